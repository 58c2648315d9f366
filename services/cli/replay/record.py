"""The form of vLLM's recorded decisions, in which runs of scenarios are recorded."""

from collections.abc import Iterable
from typing import Any

from services.scheduler.core.request import Request

Record = dict[str, Any]
"""An object of JSON."""


def request_ids(requests: Iterable[Request]) -> list[str]:
    """Requests by the names that records have of them."""
    return [request.request_id for request in requests]
