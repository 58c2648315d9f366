"""The body of requests whose prompt and answer are tokens."""

from typing import Annotated, Any

from pydantic import Field

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.asking_body import StreamedBody, renamed
from services.gateway.adapters.http.exchange.fields import Ignored, Int, Only, TokenIds
from services.gateway.adapters.http.openai.bodies import StreamOptions
from services.gateway.adapters.http.openai.sampling_fields import SamplingFields

_NO_MEDIA = "this route reads token ids only"
_NO_TRANSFER = "the server decides where keys and values are stored"


class TokenSamplingBody(SamplingFields):
    """vLLM's sampling parameters."""

    logprobs: Int | None = None
    prompt_logprobs: Annotated[
        Any, Only(why="only /v1/completions and /v1/chat/completions support this field")
    ] = None
    # The following fields are ignored, because answers of this route have no text.
    detokenize: Ignored = None
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None
    output_kind: Ignored = None


class GenerateTokensBody(StreamedBody):
    """POST /inference/v1/generate."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: TokenSamplingBody
    stream_options: StreamOptions | None = None
    output_mode: Annotated[
        Any, Only("tokens", why="only /v1/completions and /v1/chat/completions return text")
    ] = None
    token_offsets: Ignored = None
    features: Annotated[Any, Only(why=_NO_MEDIA)] = None
    content_parts: Annotated[Any, Only([], why=_NO_MEDIA)] = None
    kv_transfer_params: Annotated[Any, Only({}, why=_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[Any, Only({}, why=_NO_TRANSFER)] = None

    def in_client_words(self, error: StepwellError) -> StepwellError:
        """Returns the error with its field's internal name replaced by the path in this body."""
        inner = {name: f"sampling_params.{name}" for name in TokenSamplingBody.model_fields}
        return renamed(error, {"prompt": "token_ids", **inner})
