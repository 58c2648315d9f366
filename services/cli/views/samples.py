"""Samples of the gateway's /status or /activity, and texts about the replicas in a sample."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.cli.client import Client, ServerAway
from services.common.telemetry.time_parts import WAITS_FOR

Document = Mapping[str, Any]

_STATE_PREFIX = "ENGINE_STATE_"
_WAIT_PREFIX = "WAIT_REASON_"


@dataclass(frozen=True, slots=True)
class Sample:
    """A response of /status or /activity, and its arrival time in monotonic seconds."""

    answer: Document
    seconds: float

    @classmethod
    def take(cls, client: Client, path: str) -> "Sample":
        """Requests a sample. Raises ServerAway without a response, or CommandError for an error."""
        return cls(client.get(path), time.monotonic())

    def rates(self, replica: Document, before: "Sample | None") -> dict[str, float]:
        """Maps each counter of a replica to its increase per second since `before`. Empty without
        an earlier sample, and after a restart of the replica, because counters restart at 0.
        """
        earlier = () if before is None else before.answer["replicas"]
        old = next((one["stats"] for one in earlier if one["address"] == replica["address"]), None)
        new = replica["stats"]
        if before is None or not (old and new) or old["incarnation"] != new["incarnation"]:
            return {}
        seconds = max(self.seconds - before.seconds, 1e-6)
        return {
            name: (value - old[name]) / seconds for name, value in new.items() if type(value) is int
        }


def samples(
    client: Client, path: str, interval_seconds: float
) -> Iterator[tuple[Sample | None, Sample | ServerAway]]:
    """Yields endless pairs of the previous sample (None at first) and a new sample. If a later call
    has no response, yields None and the error. An error of the first call is raised.
    """
    before = None
    while True:
        try:
            sample = Sample.take(client, path)
        except ServerAway as error:
            if before is None:
                raise
            yield None, error
        else:
            yield before, sample
            before = sample
        time.sleep(interval_seconds)


def replica_state(replica: Document) -> str:
    """The state of a replica in a few words, which may be the reason why it cannot serve."""
    stats = replica["stats"]
    if not replica["ready"] or stats is None:
        return replica["reason"] or ("not ready" if not replica["ready"] else "ready")
    names = [str(stats["state"].removeprefix(_STATE_PREFIX).lower())]
    if stats.get("paused") and names[0] != "paused":
        names.append("pausing")
    if stats.get("drained"):
        names.append("drained")
    return ", ".join(names)


def state_colour(replica: Document) -> str:
    if not replica["ready"]:
        return "red"
    return "green" if replica_state(replica) in ("idle", "running") else "yellow"


def waiting_text(stats: Document) -> str:
    reason = stats["wait_reason"].removeprefix(_WAIT_PREFIX)
    why = "" if reason == "UNSPECIFIED" else f" for {waits_for(reason)}"
    return f"{stats['num_waiting']}{why}"


def waits_for(name: str) -> str:
    """The explanation of a wait reason such as NO_BLOCKS. Unknown reasons become lower case."""
    return WAITS_FOR.get(name.lower(), name.lower().replace("_", " "))
