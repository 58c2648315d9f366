"""The setting --redis-url: its form, and how it is shown."""

from urllib.parse import urlsplit

NEEDS_REDIS = "--redis-url needs the package redis: pip install 'stepwell[redis]'"

_SCHEMES = ("redis", "rediss")
_FORM = "must be redis://[user:password@]host:port, rediss://… for TLS, or unix://PATH"


def is_redis_url(value: str) -> str | None:
    """A check of a setting: the text has the form of a Redis URL."""
    try:
        parts = urlsplit(value)
        if parts.scheme == "unix":
            return None if parts.path else _FORM
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.port == 0:
            return _FORM
    except ValueError:  # no port, or brackets that do not match
        return _FORM
    return None


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for logs and errors."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
