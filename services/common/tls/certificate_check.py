"""Parses and checks certificates. `cryptography` is an optional dependency, so this module is
imported only if a certificate is set.
"""

import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from services.common.tls.certificates import Certificate, CertificateFiles, PemContents, PemFile


def check_certificate(files: CertificateFiles, contents: PemContents) -> Certificate:
    """Parses the contents of `files`. Raises CertificateError if the certificate is damaged or
    expired, or if the key belongs to another certificate.
    """
    own = _first_certificate(files.cert, contents.chain)
    _check_key(own, contents.key, files)
    if files.ca is not None and contents.ca is not None:
        _first_certificate(files.ca, contents.ca)
    if own.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        day = f"{own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise files.cert.error(f"holds a certificate that expired on {day}")
    return Certificate(
        contents, own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
    )


def _first_certificate(file: PemFile, pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError as error:
        raise file.error("holds no certificate in PEM form, or a damaged one") from error


def _check_key(own: x509.Certificate, pem: bytes, files: CertificateFiles) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise files.key.error("is encrypted; a key without a passphrase is needed") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise files.key.error("holds no key in PEM form, or a damaged one") from error
    if key.public_key() != own.public_key():
        raise files.key.error(f"is not the key of the certificate in {files.cert.path}")
