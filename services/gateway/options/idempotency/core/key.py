"""The key with which a client identifies a request that it may repeat, and the comparison of
requests with the same key.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import sha256

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import pack_token_ids
from services.gateway.core.caller import Caller
from services.gateway.core.request.request import ClientRequest, Prompt

FIELD = "Idempotency-Key"
"""The HTTP header with the key. Its name in lower case is used in gRPC metadata."""
MAX_LENGTH = 255
_KEY = re.compile(rf"[\x20-\x7e]{{1,{MAX_LENGTH}}}")
_SCOPE_DIGITS = 32
_NOT_COMPARED = frozenset({"request_id", "caller", "prompts", "output_form"})
"""Fields that are not compared between requests with the same key. The id may differ, because every
answer has the first request's id. The caller cannot differ, because each caller has its own keys.
Prompts are compared separately, as tokens. `output_form` does not affect the tokens.
"""


class KeyReused(InvalidArgument):
    """The caller has used this key before for a different request."""

    reason = "IDEMPOTENCY_KEY_REUSED"
    http_status = 422

    def __init__(self) -> None:
        super().__init__(
            f"{FIELD} was used before for another request; a new request needs a new key",
            field=FIELD,
        )


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's key. Each caller has its own keys, so two callers may use the same text."""

    caller_id: str
    value: str

    def scope(self, model_fingerprint: bytes) -> str:
        """Returns the id under which the answer is stored: 128 bits in hexadecimal. The id depends
        on the model, so an answer is no longer found after the model was replaced.
        """
        parts = (model_fingerprint, self.caller_id.encode(), self.value.encode())
        digest = sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts))
        return digest.hexdigest()[:_SCOPE_DIGITS]


def idempotency_key(value: str | None, caller: Caller) -> IdempotencyKey | None:
    """Returns the key in a header's value, or None if `value` is None. The key may be quoted like a
    string of structured fields (RFC 8941). Raises InvalidArgument for an invalid key.
    """
    if value is None:
        return None
    key = value.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise InvalidArgument(
            f"{FIELD} must be 1 to {MAX_LENGTH} printable ASCII characters", field=FIELD
        )
    return IdempotencyKey(caller.caller_id, key)


def fingerprint(api: str, request: ClientRequest) -> bytes:
    """Returns a digest of all data on which the answer depends: the prompts as tokens or
    embeddings, and all parameters with defaults applied. `api` is the kind of answer, such as a
    chat completion.

    The digest does not depend on how the answer is sent (streaming, usage, token ids, echo).
    """
    digest = sha256()
    for part in _parts(api, request):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(api: str, request: ClientRequest) -> Iterator[bytes]:
    yield api.encode()
    for field in fields(request):
        if field.name not in _NOT_COMPARED:
            yield f"{field.name}={getattr(request, field.name)!r}".encode()
    for prompt in request.prompts:
        yield from _prompt_parts(prompt)


def _prompt_parts(prompt: Prompt) -> Iterator[bytes]:
    if prompt.embeds is None:
        yield b"tokens"
        yield pack_token_ids(prompt.token_ids)
    else:
        yield prompt.embeds.dtype.value.encode()
        yield pack_token_ids([prompt.embeds.num_tokens])
        yield prompt.embeds.data
