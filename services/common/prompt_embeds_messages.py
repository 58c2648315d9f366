"""Embedded prompts from and to their message, for every service that carries them."""

from stepwell.common.v1 import common_pb2

from services.common.errors import InvalidArgument
from services.common.prompt_embeds import EmbedsDtype, PromptEmbeds

_DTYPES = {
    common_pb2.EMBEDS_DTYPE_FLOAT32: EmbedsDtype.FLOAT32,
    common_pb2.EMBEDS_DTYPE_BFLOAT16: EmbedsDtype.BFLOAT16,
    common_pb2.EMBEDS_DTYPE_FLOAT16: EmbedsDtype.FLOAT16,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def prompt_embeds_from_message(message: common_pb2.PromptEmbeds) -> PromptEmbeds:
    """The matrix of a message. Raises InvalidArgument for an unknown number type."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidArgument("prompt_embeds.dtype is not set", field="prompt_embeds.dtype")
    return PromptEmbeds(message.num_tokens, dtype, message.data)


def prompt_embeds_to_message(embeds: PromptEmbeds | None) -> common_pb2.PromptEmbeds | None:
    """The message of a matrix; None where there is none."""
    if embeds is None:
        return None
    return common_pb2.PromptEmbeds(
        num_tokens=embeds.num_tokens, dtype=_NUMBERS[embeds.dtype], data=embeds.data
    )
