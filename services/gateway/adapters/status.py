"""What `stepwell status` shows: every replica with its statistics."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from services.gateway.adapters.scheduler_link import SchedulerLink
from services.gateway.core.replica import Replica

_TIMEOUT_SECONDS = 1.0


async def replica_statuses(
    replicas: Iterable[tuple[Replica, SchedulerLink]],
) -> list[dict[str, Any]]:
    """Each replica: address, whether it is ready, why not, its own numbers."""
    return list(await asyncio.gather(*(_status(*pair) for pair in replicas)))


async def _status(replica: Replica, link: SchedulerLink) -> dict[str, Any]:
    served = replica.description
    status: dict[str, Any] = {
        "address": replica.address,
        "model": served.model_name if served is not None else "",
        "fingerprint": served.fingerprint.hex()[:16] if served is not None else "",
        "ready": replica.is_ready,
        "reason": replica.reason,
        "unfinished_here": replica.num_unfinished,
        "stats": None,
    }
    try:
        stats = await link.stats(_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        status["reason"] = status["reason"] or f"{error.code().name}: {error.details()}"
        return status
    numbers = MessageToDict(
        stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # JSON mapping of protobuf writes 64-bit numbers as strings.
    status["stats"] = {
        name: int(value) if isinstance(value, str) and value.isdigit() else value
        for name, value in numbers.items()
        if name != "incarnation"
    } | {"incarnation": stats.incarnation}
    return status
