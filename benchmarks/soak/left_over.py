"""Detects requests and KV blocks that are left in the services when no client sends requests."""

import asyncio
import time
from typing import Any

import httpx

_ASK_AGAIN_SECONDS = 0.1


async def settle(http: httpx.AsyncClient, gateway: str, seconds: float) -> str:
    """Waits up to `seconds` until no request runs and every block is free.

    Returns a description of the requests and blocks that are still left, or an empty text.
    `gateway` is host:port of the gateway's HTTP API.
    """
    given_up = time.monotonic() + seconds
    while left := left_over(await read_status(http, gateway)):
        if time.monotonic() > given_up:
            return left
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
    return ""


async def read_status(http: httpx.AsyncClient, gateway: str) -> dict[str, Any]:
    """The gateway's status, with the status of its replicas."""
    answer = await http.get(f"http://{gateway}/status")
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def left_over(status: dict[str, Any]) -> str:
    """Lists the requests and blocks that are left according to a status. Empty if none are."""
    replicas = [replica["stats"] for replica in status["replicas"]]
    if None in replicas:
        return "a scheduler does not answer"
    left = {
        "requests in the gateway": status["requests_in_flight"],
        "requests running": sum(stats["num_running"] for stats in replicas),
        "requests waiting": sum(stats["num_waiting"] for stats in replicas),
        "blocks not free": sum(
            stats["num_usable_blocks"] - stats["num_free_blocks"] for stats in replicas
        ),
    }
    return ", ".join(f"{count} {what}" for what, count in left.items() if count)
