"""Faults that no receiver can detect, because a field gets another value that is valid, too."""

from stepwell.common.v1.common_pb2 import SamplingParams

from benchmarks.peers.faults import Fault
from benchmarks.peers.undetectable_below import UNDETECTABLE_BELOW

_MODEL = "only the model knows which token is drawn, and how probable each one is"
_CACHE = "only the pool knows how many tokens it had cached"
_REFUSAL = "any sentence may be the reason of a refusal"
_ABORT = "an operator may have aborted any request"
_LIMIT = "a model may have any such limit; it is told anew with the next session"
_ASKED = "a client may ask for any such value"
_HANDLE = "another request of the same gateway may be meant as well"
_NEXT_HANDLE = "the gateway's next request may be meant, until it comes with the same handle"

UNDETECTABLE: dict[str, str] = {
    "Session response: deltas.token_ids": _MODEL,
    "Session response: deltas.logprobs.sampled.token_ids": _MODEL,
    "Session response: deltas.logprobs.sampled.logprobs": _MODEL,
    "Session response: deltas.logprobs.sampled.ranks": _MODEL,
    "Session response: deltas.logprobs.prompt.token_ids": _MODEL,
    "Session response: deltas.logprobs.prompt.logprobs": _MODEL,
    "Session response: deltas.logprobs.prompt.ranks": _MODEL,
    "Session response: deltas.pooled.values": _MODEL,
    "Session response: deltas.admitted.num_cached_tokens": _CACHE,
    "Session response: deltas.finished.reason: another": _ABORT,
    "Session response: deltas.rejected.message": _REFUSAL,
    "Session response: deltas.rejected.handle": _HANDLE,
    "Session request: abort.handles": _HANDLE,
    "Session request: add.handle: one more": _NEXT_HANDLE,
    "Session request: adds.requests.handle: one more": _NEXT_HANDLE,
    **{
        f"Session response: opened.{field}": _LIMIT
        for field in ("vocab_size", "max_model_len", "max_request_tokens", "eos_token_ids")
    },
    **{
        f"Session request: {path}.{field}": _ASKED
        for path in ("add", "adds.requests", "chunk")
        for field in (
            *("prompt_token_ids", "output_token_ids", "token_ids", "sampling", "priority"),
            *(f"sampling.{name}" for name in SamplingParams.DESCRIPTOR.fields_by_name),
        )
    },
}
"""Maps changes to the reason why no receiver can detect them. A key `Lane: path: change` is one
change of a field, and a key `Lane: path` every change of the field.
"""


def why_undetectable(fault: Fault) -> str:
    """The reason why a fault is undetectable. It is empty for detectable faults."""
    place = f"{fault.lane}: {'.'.join(fault.path)}"
    known = UNDETECTABLE | UNDETECTABLE_BELOW
    return known.get(str(fault), known.get(place, ""))
