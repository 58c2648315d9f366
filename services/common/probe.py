"""`python -m services.common.probe SERVICE`: whether the service of this container is ready.

Asks grpc.health.v1 where the service's own variables say that it listens. Exits with 0 if it is
ready; else with 1, or with 2 if it cannot be asked, and one sentence on standard error.
"""

import os
import sys
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.addresses import (
    is_unix_address,
    is_wildcard,
    join_host_port,
    split_host_port,
)
from services.common.server import READINESS
from services.common.settings import env_prefix, exit_with

_ANSWER_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str]) -> None:
    """Ends the process with the status."""
    if len(argv) != 1:
        exit_with("usage: python -m services.common.probe SERVICE")
    address = probed_address(argv[0], os.environ)
    if reason := why_not_ready(address):
        exit_with(f"stepwell {argv[0]} at {address} is not ready: {reason}", 1)


def probed_address(service: str, environ: Mapping[str, str]) -> str:
    """Where the service answers for its health: STEPWELL_<SERVICE>_HEALTH_ADDRESS, else its
    address, with this machine in place of all addresses. Ends the process if there is neither.
    """
    prefix = env_prefix(service)
    names = (f"{prefix}HEALTH_ADDRESS", f"{prefix}ADDRESS")
    address = next((environ[name] for name in names if name in environ), "")
    if not address:
        exit_with(f"one of {' and '.join(names)} must be set")
    if not is_unix_address(address) and is_wildcard(address):
        return join_host_port(_LOOPBACK, split_host_port(address)[1])
    return address


def why_not_ready(address: str) -> str:
    """What keeps the server at host:port or unix:PATH from being ready; empty if it is."""
    request = health_pb2.HealthCheckRequest(service=READINESS)
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else "it says that it is not"


if __name__ == "__main__":
    main(sys.argv[1:])
