"""Names of requests, which clients may choose: they stand in logs, traces and answers."""

import re

from services.common.errors import InvalidArgument

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def is_request_id(name: str) -> bool:
    """Whether it is 1 to 128 printable ASCII characters, without spaces."""
    return _NAME.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises InvalidArgument unless `is_request_id`."""
    if not is_request_id(name):
        raise InvalidArgument(
            "request_id must be 1 to 128 printable ASCII characters, without spaces",
            field="request_id",
        )
