"""Certificate authorities and certificates for tests."""

import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from services.common.tls.certificate_check import check_certificate
from services.common.tls.certificate_watch import CertificateWatch
from services.common.tls.certificates import CertificateFiles, PemFile
from services.common.tls.credentials import Tls

ONE_DAY = 86_400.0
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, both in PEM format."""

    chain: bytes
    key: bytes


class Authority:
    """Issues certificates valid since an hour ago, with the X.509 extensions of Python 3.13."""

    def __init__(self, name: str = "an authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._key_identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            _builder(self._name, self._name, self._key, 30 * ONE_DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_signing_only(), critical=True)
            .add_extension(self._key_identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(Encoding.PEM)

    def issue(self, *names: str, seconds: float = ONE_DAY) -> Issued:
        """A certificate for DNS names, addresses and URIs, valid for `seconds` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject_names = x509.SubjectAlternativeName([_subject_name(name) for name in names])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            self._key_identifier
        )
        certificate = (
            _builder(_name(names[0] if names else "nobody"), self._name, key, seconds)
            .add_extension(subject_names, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Issued(certificate.public_bytes(Encoding.PEM), pem)


@dataclass(frozen=True)
class Files:
    """A certificate, its key and trusted authorities as files of a directory, made by `write`."""

    directory: Path

    @property
    def cert(self) -> Path:
        return self.directory / "tls.crt"

    @property
    def key(self) -> Path:
        return self.directory / "tls.key"

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"

    def write(self, issued: Issued, *trusted: Authority) -> "Files":
        """Replaces each file atomically. `trusted` are the authorities in the file `ca`, which is
        not changed if there are none.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        contents = {self.cert: issued.chain, self.key: issued.key}
        if trusted:
            contents[self.ca] = b"".join(authority.pem for authority in trusted)
        for path, pem in contents.items():
            new = path.with_suffix(".new")
            new.write_bytes(pem)
            new.replace(path)
        return self

    def files(self, *, mutual: bool = True) -> CertificateFiles:
        return CertificateFiles(
            PemFile("internal_tls_cert_file", self.cert),
            PemFile("internal_tls_key_file", self.key),
            PemFile("internal_tls_ca_file", self.ca) if mutual else None,
        )

    def tls(self, *allowed: str, server_name: str | None = None, mutual: bool = True) -> Tls:
        """A TLS configuration with these files. Only `watch.look()` reads changed files again."""
        watch = CertificateWatch("internal", self.files(mutual=mutual), check_certificate)
        return Tls(watch, frozenset(allowed), server_name)

    def settings(self, prefix: str = "internal_tls", ca: str = "ca") -> dict[str, Path]:
        return {
            f"{prefix}_cert_file": self.cert,
            f"{prefix}_key_file": self.key,
            f"{prefix}_{ca}_file": self.ca,
        }

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context


class SwappedDirectory:
    """A directory that is laid out like a Kubernetes secret mount: each file is a link into
    `..data`, which is itself a link to a directory. Replacing the link `..data` swaps all files at
    once.
    """

    def __init__(self, directory: Path) -> None:
        self.files = Files(directory)
        self._number = 0
        directory.mkdir(parents=True)
        for path in (self.files.cert, self.files.key, self.files.ca):
            path.symlink_to(Path("..data") / path.name)

    def swap(self, issued: Issued, *trusted: Authority) -> Files:
        self._number += 1
        version = Path(f"..version-{self._number}")
        Files(self.files.directory / version).write(issued, *trusted)
        link = self.files.directory / "..data_tmp"
        link.symlink_to(version)
        os.replace(link, self.files.directory / "..data")  # noqa: PTH105 - it is about the link
        return self.files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, seconds: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
    )


def _signing_only() -> x509.KeyUsage:
    others = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **others)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _subject_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
