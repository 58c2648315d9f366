"""TLS certificates of the commands that are clients: reads their flags, and explains TLS errors."""

import argparse
import os
import ssl
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Self

from services.cli.errors import CommandError

_FLAGS = {
    "ca_file": "authorities (CA, PEM) that the server's certificate may come from "
    "(default: those of the system); or STEPWELL_CA_FILE",
    "cert_file": "certificate (PEM) for a server that asks for one; or STEPWELL_CERT_FILE",
    "key_file": "key of that certificate (PEM); or STEPWELL_KEY_FILE",
}

_TLS_ERRORS = (
    ("Hostname mismatch", "the server's certificate is for another name"),
    ("IP address mismatch", "the server's certificate is for another address"),
    ("certificate has expired", "the server's certificate has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not trusted; --ca-file names its CA",
    ),
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS there; is it http://?"),
    ("CERTIFICATE_REQUIRED", "the server asks for a certificate; --cert-file names it"),
    ("UNKNOWN_CA", "the server does not trust the certificate of --cert-file"),
)
"""Pairs of a part of OpenSSL's messages and an explanation."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for https: trusted authorities, a client certificate, and its key."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        for name, text in _FLAGS.items():
            variable = f"STEPWELL_{name.upper()}"
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, default=os.environ.get(variable), metavar="PATH", help=text)

    @classmethod
    def taken_from(cls, arguments: MutableMapping[str, Any]) -> Self:
        """Creates an object from the flags, and removes these flags from `arguments`."""
        return cls(**{name: arguments.pop(name) for name in _FLAGS})

    def context(self) -> ssl.SSLContext:
        """The SSL context with these files. Raises CommandError if a file cannot be used."""
        if (self.cert_file is None) != (self.key_file is None):
            raise CommandError("--cert-file and --key-file need each other", exit_status=2)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise CommandError(f"--ca-file {self.ca_file}: {_why(error)}", exit_status=2) from error
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except OSError as error:
                sentence = f"--cert-file {self.cert_file}, --key-file {self.key_file}"
                raise CommandError(f"{sentence}: {_why(error)}", exit_status=2) from error
        return context


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).replace("_", " ").lower()


def why_no_tls(error: str) -> str:
    meanings = (meaning for words, meaning in _TLS_ERRORS if words in error)
    return next(meanings, error)
