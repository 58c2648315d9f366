"""Building blocks of request bodies: strict types, and fields that are known but not served."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Numbers beyond this cannot be meant; without a bound an integer of a million digits is parsed.
_INT64 = 2**63
Int = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """A JSON object of which every field is known and has exactly its type; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def only(*values: Any, why: str) -> AfterValidator:
    """For a field that is accepted when null or one of `values`, since it then changes nothing."""

    def check(value: Any) -> None:
        if value is None or any(type(value) is type(v) and value == v for v in values):
            return
        raise PydanticCustomError("not_supported", "{why}", {"why": why})

    return AfterValidator(check)
