"""The descriptions of operations in the OpenAPI document."""

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.http.openapi.document import openapi_document


async def opened(request: Request) -> Response:
    """Opens something whose description is so long that the sentence continues on another
    line. It has a second sentence.
    """
    raise AssertionError(request)


def test_a_summary_is_a_whole_sentence() -> None:
    document = openapi_document(
        "title", "text", [Route("/it", opened, "text/plain")], asks_for_keys=False, limit_headers=()
    )
    assert document["paths"]["/it"]["get"]["summary"] == (
        "Opens something whose description is so long that the sentence continues on another line"
    )
