"""Writes log-probabilities in the schemas of OpenAI's and vLLM's answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from services.gateway.core.ports import Tokenizer
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import Prompt

TokenText = Callable[[Tokenizer, int], str]

# The four parallel lists of a completion's `logprobs`.
TOKENS, TOKEN_LOGPROBS, TOP_LOGPROBS, TEXT_OFFSET = (
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the token's text. A token that is only part of a character becomes a text such as
    `bytes:\\xe2\\x80`, as in OpenAI's API.
    """
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_number(_tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the token's id in the format that vLLM uses for clients that request token ids."""
    return f"token_id:{token_id}"


def chat_logprobs(
    rows: LogprobRows, tokenizer: Tokenizer, token_text: TokenText = token_text
) -> Iterator[dict[str, Any]]:
    """Generates the entries of `logprobs.content` in a chat answer, one per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(raw)}

    for ids, probs, _ in rows.rows():
        yield {
            **entry(ids[0], probs[0]),
            "top_logprobs": [entry(*best) for best in zip(ids[1:], probs[1:], strict=True)],
        }


def completion_logprobs(
    rows: LogprobRows,
    offsets: Sequence[int],
    tokenizer: Tokenizer,
    token_text: TokenText = token_text,
) -> dict[str, Iterable[Any]]:
    """Returns the field `logprobs` of a completion: four parallel lists.

    `offsets[i]` is the position in the text at which token i starts. The chosen token is added to
    the most probable tokens, so there can be one entry more than requested.
    """

    def top(ids: list[int], probs: list[float]) -> dict[str, float]:
        best = {
            token_text(tokenizer, token): prob
            for token, prob in zip(ids[1:], probs[1:], strict=True)
        }
        best.setdefault(token_text(tokenizer, ids[0]), probs[0])
        return best

    return {
        TOKENS: (token_text(tokenizer, ids[0]) for ids, _, _ in rows.rows()),
        TOKEN_LOGPROBS: (probs[0] for _, probs, _ in rows.rows()),
        TOP_LOGPROBS: (top(ids, probs) for ids, probs, _ in rows.rows()),
        TEXT_OFFSET: offsets,
    }


def echoed_logprobs(
    prompt: Prompt,
    rows: LogprobRows | None,
    tokenizer: Tokenizer,
    token_text: TokenText = token_text,
) -> dict[str, Iterable[Any]]:
    """Returns the field `logprobs` of an echoed prompt, which must have offsets. The first token of
    the prompt has no log-probability.
    """
    offsets = prompt.offsets or []
    first: dict[str, list[Any]] = {
        TOKENS: [token_text(tokenizer, prompt.token_ids[0])],
        TOKEN_LOGPROBS: [None],
        TOP_LOGPROBS: [None],
        TEXT_OFFSET: offsets[:1],
    }
    if rows is None:
        return {**first}
    rest = completion_logprobs(rows, offsets[1:], tokenizer, token_text)
    return {name: chain(first[name], rest[name]) for name in first}


def prompt_logprobs(rows: LogprobRows | None, tokenizer: Tokenizer) -> Iterator[Any]:
    """Generates the entries of vLLM's `prompt_logprobs`: for each prompt token, a map from
    candidate token ids to log-probability, rank and text. The first entry is None.
    """
    yield None
    for ids, probs, own_rank in rows.rows() if rows is not None else ():
        entries = {}
        for rank, (token, prob) in enumerate(zip(ids[1:], probs[1:], strict=True), start=1):
            entries[str(token)] = _ranked(prob, rank, token, tokenizer)
        entries[str(ids[0])] = _ranked(probs[0], own_rank, ids[0], tokenizer)
        yield entries


def _ranked(logprob: float, rank: int, token_id: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
