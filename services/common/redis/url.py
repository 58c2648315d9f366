"""Checks the format of the setting --redis-url, and displays it without secrets."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

NEEDS_REDIS = "--redis-url needs the package redis: pip install 'stepwell[redis]'"

_SCHEMES = ("redis", "rediss")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Query parameters of a rediss:// URL that name files. The first file has the trusted certificate
authorities, by default the system's. The other files have a client certificate and its key.
"""
_FORM = "must be redis://[user:password@]host:port, rediss://… for TLS, or unix://PATH"


def is_redis_url(value: str) -> str | None:
    """Returns an error text if a setting is not a well-formed Redis URL, otherwise None."""
    try:
        parts = urlsplit(value)
        if parts.scheme == "unix":
            return None if parts.path else _FORM
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.port == 0:
            return _FORM
    except ValueError:  # an invalid port, or unbalanced brackets
        return _FORM
    return None


def missing_file(url: str) -> str | None:
    """Returns a sentence about a missing file that a URL names, or None if all files exist."""
    for name, value in parse_qsl(urlsplit(url).query):
        if name in _FILES and not url.startswith("rediss:"):
            return f"{name} is for rediss:// URLs"
        if name in _FILES and not Path(value).is_file():
            return f"there is no file {value}, which {name} names"
    return None


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for logs and errors."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
