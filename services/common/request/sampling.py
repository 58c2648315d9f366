"""The sampling parameters of a request, and their ranges."""

from dataclasses import dataclass

from services.common.errors import InvalidArgument
from services.common.request.repetition import RepetitionDetection
from services.common.request.structured_outputs import StructuredOutputs
from services.common.request.thinking_budget import ThinkingBudget

MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 2.0**128 - 2.0**104
# Outside this range, logits would exceed the float32 range, and no token could be sampled.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 2.0**-100, 2.0**100

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, MAX_FLOAT32),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, MAX_SEED),
    "top_k": (0, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
}
"""Maps the name of each numeric parameter with two limits to its minimum and its maximum."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled, and when a request ends. stepwell.common.v1.SamplingParams specifies
    the fields. None means that the client did not set the field. The gateway sets `seed`,
    `max_tokens` and `eos_token_ids` before it sends a request to a scheduler.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias_token_ids: tuple[int, ...] = ()
    logit_bias_values: tuple[float, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: ThinkingBudget | None = None

    @property
    def penalises(self) -> bool:
        """Whether earlier occurrences of a token change its logit."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidArgument, which names the first invalid field. Values out of range, NaN,
        unknown token ids, and combinations that leave no token to sample are invalid.
        """
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _invalid("max_tokens", f"must be at least 1, not {self.max_tokens}")
        self._validate_numbers(vocab_size)
        self._validate_tokens(vocab_size)
        self._validate_choice(vocab_size)
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
        if self.thinking_budget is not None:
            self.thinking_budget.validate(
                lambda field, ids: _require_vocabulary(field, ids, vocab_size)
            )

    def _validate_numbers(self, vocab_size: int) -> None:
        for field, (low, high) in RANGES.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise _out_of_range(field, value, low, high)
        if not 0 < self.top_p <= 1:
            raise _invalid("top_p", f"is {self.top_p}, not in (0, 1]")
        _require_range("logprobs", self.logprobs, 0, vocab_size)
        _require_range("prompt_logprobs", self.prompt_logprobs, 0, vocab_size)

    def _validate_tokens(self, vocab_size: int) -> None:
        if len(self.logit_bias_token_ids) != len(self.logit_bias_values):
            raise _invalid(
                "logit_bias_values",
                f"has {len(self.logit_bias_values)} entries for "
                f"{len(self.logit_bias_token_ids)} token ids",
            )
        for value in self.logit_bias_values:
            _require_range("logit_bias_values", value, -100, 100)
        if len(set(self.logit_bias_token_ids)) != len(self.logit_bias_token_ids):
            raise _invalid("logit_bias_token_ids", "contains a token twice")
        _require_vocabulary("logit_bias_token_ids", self.logit_bias_token_ids, vocab_size)
        _require_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _require_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        _require_vocabulary("eos_token_ids", self.eos_token_ids, vocab_size)
        for word in self.bad_words:
            if not word:
                raise _invalid("bad_words", "contains an empty sequence")
            _require_vocabulary("bad_words", word, vocab_size)

    def _validate_choice(self, vocab_size: int) -> None:
        banned = {word[0] for word in self.bad_words if len(word) == 1}
        if not self._leaves_choice(banned, vocab_size):
            raise _invalid("bad_words", "leave no token to sample")
        ending = {*self.stop_token_ids, *self.eos_token_ids}
        if self.min_tokens and not self._leaves_choice(banned | ending, vocab_size):
            raise _invalid(
                "min_tokens",
                "leaves no token to sample, since only tokens that end the output are allowed",
            )

    def _leaves_choice(self, banned: set[int], vocab_size: int) -> bool:
        if self.allowed_token_ids:
            return not banned.issuperset(self.allowed_token_ids)
        return len(banned) < vocab_size


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {problem}", field=field)


def _require_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise _out_of_range(field, value, low, high)


def _out_of_range(field: str, value: float, low: float, high: float) -> InvalidArgument:
    if high == MAX_FLOAT32 and value < low:
        return _invalid(field, f"must be at least {low}, not {value}")
    return _invalid(field, f"is {value}, not in [{low}, {high}]")


def _require_vocabulary(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise _invalid(
                field, f"contains token {token_id}, which is not in the vocabulary of {vocab_size}"
            )
