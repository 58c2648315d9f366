"""A certificate, its key and the trusted authorities in PEM files (RFC 7468)."""

from dataclasses import dataclass
from pathlib import Path

from services.common.process.settings import SettingError, flag_name


class CertificateError(SettingError):
    """A file is unusable. The message names the setting, the file and the reason."""


@dataclass(frozen=True, slots=True)
class PemFile:
    """A PEM file that a setting names."""

    setting: str
    path: Path

    def read(self) -> bytes:
        """Reads the file. Raises CertificateError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror}") from error

    def error(self, complaint: str) -> CertificateError:
        return CertificateError(f"{flag_name(self.setting)} {self.path} {complaint}")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of a certificate chain and its key. `ca` has the authorities that peers need."""

    cert: PemFile
    key: PemFile
    ca: PemFile | None = None

    def read(self) -> "PemContents":
        """Reads all files. Raises CertificateError if a file cannot be read."""
        return PemContents(
            self.cert.read(), self.key.read(), None if self.ca is None else self.ca.read()
        )


@dataclass(frozen=True, slots=True)
class PemContents:
    chain: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with matching files, and its validity period in Unix seconds."""

    pem: PemContents
    not_before: float
    not_after: float
