"""Creates a service's `Tls` from its settings. Without certificates, the
package `cryptography` is not needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.process.settings import SettingError, flag_name
from services.common.tls.certificate_watch import CertificateWatch
from services.common.tls.certificates import CertificateFiles, PemFile
from services.common.tls.credentials import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFields:
    """The names of the settings for one use of TLS. `purpose` names the certificate in logs and
    metrics. If `is_ca_needed` is False, the setting of `ca` is optional, and if it is not set,
    peers need no certificate.
    """

    purpose: str
    cert: str
    key: str
    ca: str
    is_ca_needed: bool
    allowed_names: str = ""
    server_name: str = ""


INTERNAL = TlsFields(
    purpose="internal",
    cert="internal_tls_cert_file",
    key="internal_tls_key_file",
    ca="internal_tls_ca_file",
    is_ca_needed=True,
    allowed_names="internal_tls_allowed_names",
    server_name="internal_tls_server_name",
)
"""TLS between the services. A service has the setting of `allowed_names` if other services call it,
and the setting of `server_name` if it calls other services.
"""


@contextmanager
def tls_of(settings: Any, fields: TlsFields = INTERNAL) -> Iterator[Tls | None]:
    """Yields a `Tls` that follows changes of its files, or None without certificates. Raises
    SettingError.
    """
    values = {
        name: getattr(settings, name, None) or None
        for name in (fields.cert, fields.key, fields.ca, fields.allowed_names, fields.server_name)
    }
    given = [name for name, value in values.items() if value is not None]
    if not given:
        yield None
        return
    _require_all(fields, given)
    try:
        from services.common.tls.certificate_check import check_certificate  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = "the package cryptography: pip install 'stepwell[tls]'"
        raise SettingError(f"{flag_name(fields.cert)} needs {package}") from error

    def file(name: str) -> PemFile:
        return PemFile(name, Path(values[name] or ""))

    ca = file(fields.ca) if fields.ca in given else None
    files = CertificateFiles(file(fields.cert), file(fields.key), ca)
    watch = CertificateWatch(fields.purpose, files, check_certificate)
    names = frozenset(values[fields.allowed_names] or ())
    with watch.running():
        yield Tls(watch, names, values[fields.server_name])


def _require_all(fields: TlsFields, given: list[str]) -> None:
    needed = [fields.cert, fields.key, *([fields.ca] if fields.is_ca_needed else [])]
    missing = [flag_name(name) for name in needed if name not in given]
    if missing:
        raise SettingError(f"{flag_name(given[0])} needs {' and '.join(missing)}")
