import logging
import ssl

from services.common.process.settings import SettingError
from services.common.tls.certificates import Certificate
from services.common.tls.credentials import Tls

logger = logging.getLogger(__name__)


class TlsContext:
    """Provides the SSLContext for each handshake. A new context is made after each change of the
    certificate.
    """

    def __init__(self, tls: Tls) -> None:
        """Raises SettingError if OpenSSL refuses the certificate, for example because its key is
        too short.
        """
        self._watch = tls.watch
        self._certificate = self._watch.current
        self._refused: Certificate | None = None
        try:
            self._context = self._make()
        except (ssl.SSLError, OSError) as error:
            raise SettingError(str(self._watch.files.cert.error(_refusal(error)))) from error

    def current(self) -> ssl.SSLContext:
        wanted = self._watch.current
        if wanted is not self._certificate and wanted is not self._refused:
            try:
                self._context = self._make()
                self._certificate = wanted
            except (ssl.SSLError, OSError) as error:
                self._refused = wanted
                complaint = self._watch.files.cert.error(_refusal(error))
                logger.warning("%s; HTTP goes on with the certificate before it", complaint)
        return self._context

    def _make(self) -> ssl.SSLContext:
        files = self._watch.files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert.path, files.key.path)
        context.set_alpn_protocols(["http/1.1"])
        if files.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(files.ca.path)
        return context


def _refusal(error: OSError) -> str:
    reason = getattr(error, "reason", None) or str(error)
    return f"is refused by OpenSSL: {reason.replace('_', ' ').lower()}"
