"""The remaining limits of a tenant, in OpenAI's headers `x-ratelimit-*`."""

from services.gateway.options.tenants.core.limits.rule import UNITS, LimitSet, Standing

_NAMES = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in _NAMES
)


def rate_limit_headers(limits: LimitSet, standing: Standing) -> list[tuple[str, str]]:
    """Returns three headers for each limit per minute that the tenant has. `standing` has the
    levels of the limits.
    """
    return [
        *_headers("requests", limits.requests_per_minute, standing.requests_level),
        *_headers("tokens", limits.tokens_per_minute, standing.tokens_level),
    ]


def _headers(what: str, limit: int | None, level: int) -> list[tuple[str, str]]:
    if limit is None:
        return []
    millis_to_full = -(-(limit * UNITS - level) // limit)
    values = (str(limit), str(max(0, level // UNITS)), duration(millis_to_full))
    return [
        (f"x-ratelimit-{name}-{what}", value) for name, value in zip(_NAMES, values, strict=True)
    ]


def duration(millis: int) -> str:
    """Formats a duration as OpenAI does: 120ms, 1.5s, 6m0s."""
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
