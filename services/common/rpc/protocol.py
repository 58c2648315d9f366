"""Which services work together: those of one protocol, whatever their versions.

A client names its protocol and its version with its first call: a gateway as it opens a session, a
scheduler as it opens its pool and asks what its workers run. A service of another protocol refuses
it there. The answer names the service's own, which the client compares: neither side reads what it
might take for something else.
"""

from functools import cache
from importlib.metadata import version

from stepwell.common.v1 import common_pb2

from services.common.errors import FailedPrecondition

PROTOCOL = 2
"""Raised with each change of what services send each other after which one that does not know the
change would compute, answer or keep something else: a field that must be honoured, another meaning
or form of one, a message that must be answered. What can be ignored without harm, such as a further
number in statistics, leaves it as it is.
"""


class OtherProtocol(FailedPrecondition):
    """The other side is of another protocol; the message has the versions of both."""

    reason = "OTHER_PROTOCOL"


@cache
def own_release() -> common_pb2.Release:
    """Of this process."""
    return common_pb2.Release(protocol=PROTOCOL, version=version("stepwell"))


def require_same_protocol(peer: str, theirs: common_pb2.Release, service: str) -> None:
    """Raises OtherProtocol. `peer` and `service` are names for people, such as "the scheduler" and
    "worker".
    """
    if theirs.protocol != PROTOCOL:
        raise OtherProtocol(
            f"this {service} has {_shown(own_release())}, {peer} {_shown(theirs)}: "
            "services of different protocols do not work together"
        )


def _shown(release: common_pb2.Release) -> str:
    if not release.protocol:
        return "a version that names no protocol"
    return f"version {release.version[:50]} (protocol {release.protocol})"
