"""grpc credentials for servers and channels. A new connection uses the service's current
certificate. An open connection keeps the certificate with which it began.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.common.errors import PermissionDenied
from services.common.rpc.addresses import is_unix_address
from services.common.rpc.renewing_channel import RenewingChannel
from services.common.tls.certificate_watch import CertificateWatch
from services.common.tls.certificates import Certificate

_SUBJECT_NAMES = "x509_subject_alternative_name"
_NAME_OF_SERVER = "grpc.ssl_target_name_override"


@dataclass(frozen=True, slots=True)
class Tls:
    """A service's certificate, and the names that peers' certificates must have. A caller's
    certificate must have one of `allowed_names` as subject alternative name (DNS name, address or
    URI). If `allowed_names` is empty, every certificate of the trusted authority is allowed.
    `server_name` is the name that servers' certificates must have, by default the host of the
    server's address.
    """

    watch: CertificateWatch
    allowed_names: frozenset[str] = frozenset()
    server_name: str | None = None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that require client certificates if an authority for them is set."""
        served = [self.watch.current]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """grpc calls this before each handshake. None means that nothing has changed."""
            if self.watch.current is served[0]:
                return None
            served[0] = self.watch.current
            return _configuration(served[0])

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served[0]),
            fetch,  # type: ignore[arg-type] # the stub leaves None out
            require_client_authentication=served[0].pem.ca is not None,
        )

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> RenewingChannel:
        """A channel whose calls use the certificate that is current when the call starts."""
        if self.server_name is not None:
            options = (*options, (_NAME_OF_SERVER, self.server_name))
        watch = self.watch
        return RenewingChannel(
            lambda: grpc.aio.secure_channel(
                address, channel_credentials(watch.current), options=options
            ),
            lambda: watch.current,
        )

    def check_caller(self, context: "grpc.aio.ServicerContext[object, object]") -> None:
        """Raises PermissionDenied for a caller over the network without an allowed name."""
        if self.allowed_names and not is_unix_address(context.peer()):
            subject = context.auth_context().get(_SUBJECT_NAMES, ())
            names = {name.decode(errors="replace") for name in subject}
            if self.allowed_names.isdisjoint(names):
                raise PermissionDenied(
                    f"certificates for {', '.join(sorted(names)) or 'no name'} may not call this "
                    "service"
                )


def channel_credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    """Client credentials with a certificate, which trust servers with its authority."""
    pem = certificate.pem
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.chain)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pem = certificate.pem
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.ca)
