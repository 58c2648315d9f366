"""The format of records of scenario runs, which is also the format of vLLM's recorded decisions."""

from collections.abc import Iterable
from typing import Any

from services.scheduler.core.request import Request

Record = dict[str, Any]
"""A JSON object."""


def request_ids(requests: Iterable[Request]) -> list[str]:
    """The ids by which records name requests."""
    return [request.request_id for request in requests]
