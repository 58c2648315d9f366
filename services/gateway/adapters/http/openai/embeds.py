"""Reads embedded prompts: a safetensors file with one matrix, in base64.

A safetensors file is a length, a JSON header and numbers. Unlike a pickle it contains nothing that
is executed. https://huggingface.co/docs/safetensors
"""

import base64
import binascii
import json
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 64 * 1024


def read_prompt_embeds(encoded: str) -> PromptEmbeds:
    """Returns the only tensor of the file. Its shape is [num_tokens, hidden_size]. Raises
    InvalidArgument if the file is invalid.
    """
    try:
        file = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal("is not base64") from error
    begin = _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < begin <= min(len(file), _MAX_HEADER_BYTES):
        raise _refusal("is not a safetensors file")
    name, entry = _only_tensor(file[_LENGTH_BYTES:begin])
    try:
        dtype = EmbedsDtype(entry["dtype"])
        num_tokens, hidden_size = _two_sizes(entry["shape"])
        first, end = _two_sizes(entry["data_offsets"])
        data = file[begin + first : begin + end]
        is_whole = hidden_size > 0 and len(data) == num_tokens * hidden_size * dtype.itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(f"must hold a matrix in F32, BF16 or F16, and {name!r} is none") from error
    if not is_whole:
        raise _refusal("is cut short")
    embeds = PromptEmbeds(num_tokens, dtype, data)
    embeds.check_finite()
    return embeds


def _only_tensor(header: bytes) -> tuple[str, dict[str, Any]]:
    try:
        entries = json.loads(header)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _refusal("is not a safetensors file") from error
    if len(tensors) != 1:
        raise _refusal(f"must hold one tensor, not {len(tensors)}")
    return next(iter(tensors.items()))


def _two_sizes(pair: Any) -> tuple[int, int]:
    first, second = pair
    if not (type(first) is type(second) is int and min(first, second) >= 0):
        raise ValueError("not two whole numbers from 0 on")
    return first, second


def _refusal(problem: str) -> InvalidArgument:
    return InvalidArgument(f"prompt_embeds {problem}", field="prompt_embeds")
