"""Reads a certificate, its key and the trusted authorities from PEM files (RFC 7468).
`cryptography` is an optional dependency, so this module is imported only if a certificate is set.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

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

    def check(self, contents: "PemContents") -> "Certificate":
        """Parses a certificate. Raises CertificateError if it is damaged or expired, or if the key
        belongs to another certificate.
        """
        own = self._first_certificate(self.cert, contents.chain)
        self._check_key(own, contents.key)
        if self.ca is not None and contents.ca is not None:
            self._first_certificate(self.ca, contents.ca)
        if own.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
            raise self.cert.error(f"holds a certificate that expired on {_day(own)}")
        return Certificate(
            contents, own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
        )

    def _first_certificate(self, file: PemFile, pem: bytes) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificates(pem)[0]
        except ValueError as error:
            raise file.error("holds no certificate in PEM form, or a damaged one") from error

    def _check_key(self, own: x509.Certificate, pem: bytes) -> None:
        try:
            key = load_pem_private_key(pem, password=None)
        except TypeError as error:
            raise self.key.error("is encrypted; a key without a passphrase is needed") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise self.key.error("holds no key in PEM form, or a damaged one") from error
        if key.public_key() != own.public_key():
            raise self.key.error(f"is not the key of the certificate in {self.cert.path}")


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


def _day(certificate: x509.Certificate) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
