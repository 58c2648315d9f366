"""The common fields of the bodies of all requests that run the model."""

import re
from abc import abstractmethod
from collections.abc import Mapping

from pydantic import Field

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.fields import Body, Int
from services.gateway.adapters.http.exchange.program_fields import ProgramFields


class AskingBody(Body):
    """The body of a request that runs the model."""

    model: str | None = None
    # The other fields are extensions of vLLM.
    priority: Int | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = None
    include_metrics: bool | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128)

    @abstractmethod
    def in_client_words(self, error: StepwellError) -> StepwellError:
        """Returns the error, with the core's name of the invalid field replaced by this body's."""


class StreamedBody(AskingBody, ProgramFields):
    """The body of a request whose answer may be streamed."""

    stream: bool | None = None


def renamed(error: StepwellError, names: Mapping[str, str]) -> StepwellError:
    """Returns the error, with its field renamed if the field is a key of `names`."""
    own, bracket, number = (error.field or "").partition("[")
    name = names.get(own)
    if name is None:
        return error
    return type(error)(
        re.sub(rf"\b{own}\b", name, error.message, count=1),
        field=name + bracket + number,
        reason=error.error_reason,
        retry_after_seconds=error.retry_after_seconds,
    )
