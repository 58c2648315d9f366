"""The format in which runs of scenarios are recorded. vLLM's recorded decisions have the same
format.
"""

from collections.abc import Iterable
from typing import Any

from services.scheduler.core.request import Request

Record = dict[str, Any]
"""A JSON object."""


def request_ids(requests: Iterable[Request]) -> list[str]:
    """The request ids, as records contain them."""
    return [request.request_id for request in requests]
