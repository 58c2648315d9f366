from stepwell.common.v1 import common_pb2

from services.common.errors import InvalidArgument
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.rpc.proto_enum import ProtoEnum

_DTYPES = ProtoEnum(EmbedsDtype, common_pb2.EmbedsDtype, "EMBEDS_DTYPE_")


def prompt_embeds_from_proto(message: common_pb2.PromptEmbeds) -> PromptEmbeds:
    """Converts a message to a matrix. Raises InvalidArgument for an unknown number type."""
    dtype = _DTYPES.from_proto(message.dtype)
    if dtype is None:
        raise InvalidArgument("prompt_embeds.dtype is not set", field="prompt_embeds.dtype")
    return PromptEmbeds(message.num_tokens, dtype, message.data)


def prompt_embeds_to_proto(embeds: PromptEmbeds | None) -> common_pb2.PromptEmbeds | None:
    if embeds is None:
        return None
    return common_pb2.PromptEmbeds(
        num_tokens=embeds.num_tokens, dtype=_DTYPES.to_proto(embeds.dtype), data=embeds.data
    )
