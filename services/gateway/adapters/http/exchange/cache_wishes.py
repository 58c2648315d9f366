"""Fields in which clients of several APIs request that a prompt stays cached for some time.

When a body with one of these fields is validated, the time is added to the validation's BodyNotes.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.adapters.http.exchange.fields import Body, BodyNotes, HistoryBody

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TTL = re.compile(r"([1-9][0-9]{0,3})([smhd])")
_CACHE_CONTROL_SECONDS = 300
"""The time for a `cache_control` without a ttl. Anthropic's API has the same default."""


def _as_seconds(value: Any) -> Any:
    found = _TTL.fullmatch(value) if isinstance(value, str) else None
    if found is None and value is not None:
        raise PydanticCustomError("alternative", "must be a time such as 5m or 1h")
    return found and int(found[1]) * _SECONDS[found[2]]


Ttl = Annotated[
    int | None,
    BeforeValidator(_as_seconds, json_schema_input_type=Annotated[str | None, _TTL.pattern]),
]
"""A time such as "5m", in seconds."""


class CacheControl(HistoryBody):
    """Anthropic's request to keep the prompt cached up to and including this part."""

    ttl: Ttl = None

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, BodyNotes):
            info.context.ttls.append(self.ttl or _CACHE_CONTROL_SECONDS)
        return self


class CacheBreakpoint(HistoryBody):
    """OpenAI's request to keep the prompt cached up to and including this part."""

    ttl: Ttl = None

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, BodyNotes):
            info.context.ttls.append(self.ttl)
        return self


class CacheOptions(Body):
    """OpenAI's request to keep the whole prompt cached. `mode` has no effect, because prefixes are
    always cached.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl = None

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> Self:
        if self.ttl and isinstance(info.context, BodyNotes):
            info.context.ttls.append(self.ttl)
            info.context.breakpoint_ttl = self.ttl
        return self


def _note_retention(value: str, info: ValidationInfo) -> str:
    if value == "24h" and isinstance(info.context, BodyNotes):
        info.context.ttls.append(_SECONDS["d"])
    return value


CacheRetention = Annotated[Literal["in_memory", "24h"], AfterValidator(_note_retention)]


class MarkedBody(HistoryBody):
    """A part of a prompt. Clients may request to keep the prompt cached up to this part."""

    cache_control: CacheControl | None = None
