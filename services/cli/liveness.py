"""Notices that a child hangs: it answers no health check, or answers that it is not live."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from services.cli.child import Child
from services.cli.health import NoAnswer, why_not_live
from services.common.channel import open_channel


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """How long a child may be silent: seconds in which it answers no health check. Before its first
    answer, of liveness or readiness, there is no limit.
    """

    factor: float = 2.0
    """Lengthens the time with each hang in a row after the second, since on a slow machine killing
    and starting adds load.
    """
    longest_seconds: float = 60.0
    """The longest such time."""
    loading_seconds: float = 60.0
    """The time of a child that is not ready yet."""
    stopped_share: float = 0.5
    """The share of the time that is enough for a process which the system shows as stopped."""
    pause_seconds: float = 0.6
    """Between an answer and the next check."""
    period_seconds: float = 0.2
    """Between two looks at how long it has been silent."""

    def silence_seconds(self, usual_seconds: float, num_hangs: int) -> float:
        """The bound of a child's silence after `num_hangs` in a row; else `usual_seconds`."""
        longest = max(self.longest_seconds, usual_seconds)
        return float(min(usual_seconds * self.factor ** max(0, num_hangs - 1), longest))


async def until_hung(
    child: Child, is_ready: Callable[[], bool], num_hangs: int, policy: LivenessPolicy
) -> str:
    """Checks the liveness of a child until it hangs; returns the reason.

    Time in which this process did not run, as on a machine that slept, does not count.
    """
    address = child.spec.liveness_address
    assert address is not None
    usual = policy.silence_seconds(child.spec.silence_seconds, num_hangs)
    silence: _Silence | None = None
    has_answered = False
    async with open_channel(address) as channel:
        while True:
            asking = asyncio.ensure_future(why_not_live(channel, address))
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=policy.period_seconds)
                    has_answered = has_answered or is_ready()
                    if not (has_answered or child.is_stopped):
                        silence = None
                    elif silence is None:
                        silence = _Silence(policy.pause_seconds)
                    if silence is not None:
                        silence.update()
                        if why := _too_long(child, silence, usual, is_ready(), policy):
                            return why
                with suppress(NoAnswer):
                    if why := asking.result():
                        return why
                    silence, has_answered = _Silence(policy.pause_seconds), True
            finally:
                asking.cancel()
            await asyncio.sleep(policy.pause_seconds)


def _too_long(
    child: Child, silence: "_Silence", usual: float, is_ready: bool, policy: LivenessPolicy
) -> str:
    stopped_seconds = policy.stopped_share * child.spec.silence_seconds
    if child.is_stopped and silence.seconds >= stopped_seconds:
        return f"it was stopped, and has answered no health check for {silence.seconds:.1f} s"
    if silence.seconds >= (usual if is_ready else max(policy.loading_seconds, usual)):
        return f"it has answered no health check for {silence.seconds:.1f} s"
    return ""


class _Silence:
    """Seconds since an answer in which this process ran."""

    def __init__(self, pause_seconds: float) -> None:
        self.seconds = 0.0
        self._longest_turn = 2 * pause_seconds
        self._loop = asyncio.get_running_loop()
        self._updated = self._loop.time()

    def update(self) -> None:
        now = self._loop.time()
        self.seconds += min(now - self._updated, self._longest_turn)
        self._updated = now
