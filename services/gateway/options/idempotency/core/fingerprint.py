"""Compares requests with the same key."""

from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256

from services.common.pool.block_hash import pack_token_ids
from services.gateway.core.request.request import ClientRequest, Prompt

_NOT_COMPARED = frozenset({"request_id", "tenant", "prompts", "output_form"})
"""Fields that are not compared. Answers have the id of the first request. Each tenant has its own
keys. Prompts are compared separately, as tokens. The output format does not affect the tokens.
"""


def fingerprint(api: str, request: ClientRequest) -> bytes:
    """A digest of everything that the answer depends on, with defaults applied: all parameters, and
    prompts as tokens or embeddings. `api` is the kind of answer, such as a chat completion.

    The form of the response is not compared, such as streaming, usage, token ids and echo.
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
