"""The server's address, parsed from its URL."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from services.cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of `http[s]://host[:port][/path]`. A trailing /v1 is removed from the path."""

    is_https: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses a URL. Raises CommandError if it is not an HTTP URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise CommandError(f"--url {url} is not an address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"--url {url} is not an http:// or https:// address")
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(is_https, parts.hostname, port or (443 if is_https else 80), path)

    @property
    def url(self) -> str:
        """The server's base URL, without /v1."""
        return f"http{'s' * self.is_https}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """host:port, as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
