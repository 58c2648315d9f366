"""Whether two requests under one key are the same."""

from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256

from services.common.pool.block_hash import pack_token_ids
from services.gateway.core.request.request import ClientRequest, Prompt

_NOT_COMPARED = frozenset({"request_id", "tenant", "prompts", "output_form"})
"""The name of an answer is that of the first request; a key is its tenant's; prompts are compared
as tokens; how an answer is read changes none of its tokens.
"""


def fingerprint(api: str, request: ClientRequest) -> bytes:
    """A digest of all that answers depend on, of a request with its defaults: prompts as tokens or
    embeddings, and every parameter. `api` is the kind of answer, such as a chat completion.

    How the answer is written is not compared: streamed or not, with usage, token ids or echo.
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
