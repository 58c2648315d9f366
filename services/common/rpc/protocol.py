"""Checks that services have the same protocol number. Their versions may differ.

A client sends its protocol and version with its first call: a gateway when it opens a session, a
scheduler when it opens its pool and queries its workers. A service with another protocol rejects
this call. The response contains the service's own protocol, which the client compares. Because of
these checks, neither side misinterprets a message.
"""

from functools import cache
from importlib.metadata import version

from stepwell.common.v1 import common_pb2

from services.common.errors import FailedPrecondition

PROTOCOL = 3
"""The protocol number, which increases with each incompatible change of the protos. A change is
incompatible if a service without the change would compute, return or store something wrong, for
example if a field has a new meaning or encoding, or if a new field or message must not be ignored.
A change that can be ignored without harm, such as a new statistic, is compatible.
"""


class OtherProtocol(FailedPrecondition):
    """The peer has another protocol. The message has the versions of both sides."""

    reason = "OTHER_PROTOCOL"


@cache
def own_release() -> common_pb2.Release:
    return common_pb2.Release(protocol=PROTOCOL, version=version("stepwell"))


def require_same_protocol(peer: str, theirs: common_pb2.Release, service: str) -> None:
    """Raises OtherProtocol, which names `peer` and `service`, if the protocols differ."""
    if theirs.protocol != PROTOCOL:
        raise OtherProtocol(
            f"this {service} has {_shown(own_release())}, {peer} {_shown(theirs)}: "
            "services of different protocols do not work together"
        )


def _shown(release: common_pb2.Release) -> str:
    if not release.protocol:
        return "a version without a protocol number"
    return f"version {release.version[:50]} (protocol {release.protocol})"
