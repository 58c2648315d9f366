"""The sampling parameters in request bodies. Each API inherits the fields that it has."""

from services.gateway.adapters.http.exchange.fields import Body, Int, TextOrTexts, Texts, TokenIds
from services.gateway.adapters.http.openai.formats import StructuredOutputsBody


class CommonSamplingFields(Body):
    """The sampling parameters of every API that generates."""

    temperature: float | None = None
    top_p: float | None = None
    # Extensions of vLLM.
    top_k: Int | None = None
    seed: Int | None = None


class RepetitionDetectionBody(Body):
    """The repetition that ends an answer, in vLLM's schema."""

    max_pattern_size: Int = 0
    min_pattern_size: Int = 0
    min_count: Int = 0


class SamplingFields(CommonSamplingFields):
    """The sampling parameters of completions, chat completions and /inference/v1/generate."""

    # Fields of OpenAI's API.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int | None = None
    n: Int | None = None
    stop: TextOrTexts | None = None
    # Extensions of vLLM.
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
