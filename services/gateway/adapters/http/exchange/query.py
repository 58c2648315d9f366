"""The URL query of a request, validated as strictly as bodies."""

from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from services.gateway.adapters.http.exchange.parse import refusal

Q = TypeVar("Q", bound="Query")


class Query(BaseModel):
    """Base of query models. Unknown parameters are errors. Only list parameters may be repeated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_query(request: Request, model: type[Q]) -> Q:
    """Validates the query. Raises InvalidArgument with the name of the first invalid parameter."""
    given: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        field = model.model_fields.get(name)
        is_list = field is not None and get_origin(field.annotation) is list
        given[name] = values if is_list or len(values) > 1 else values[0]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise refusal(error, "the query") from error
