"""Finds out that a child hangs: it answers no health check, or says that it cannot go on."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from services.cli.child import Child, NoAnswer


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """How long a child may be silent: seconds in which it answers no health check.

    `factor` lengthens that with each hang in a row after the second, up to `longest_seconds`: on a
    machine that is too slow, killing and starting would add to its load. A child that is not ready
    yet may load something that takes all of its time, and gets `loading_seconds`. A process that
    the system shows as stopped cannot be merely slow: for it `stopped_share` of the time is enough.
    Before its first answer, here or about its readiness, a child may be silent for any time.
    """

    factor: float = 2.0
    longest_seconds: float = 60.0
    loading_seconds: float = 60.0
    stopped_share: float = 0.5
    period_seconds: float = 0.2

    def silence_seconds(self, usual_seconds: float, num_hangs: int) -> float:
        """The bound for a child that may usually be silent for so long, after hangs in a row."""
        longest = max(self.longest_seconds, usual_seconds)
        return float(min(usual_seconds * self.factor ** max(0, num_hangs - 1), longest))


async def until_hung(
    child: Child, is_ready: Callable[[], bool], num_hangs: int, policy: LivenessPolicy
) -> str:
    """Asks a child whether it is live, again and again; returns why it is to be replaced.

    Time in which this process did not run itself, as in a machine that slept, does not count.
    """
    assert child.spec.liveness is not None
    check = child.spec.liveness()
    usual = policy.silence_seconds(child.spec.silence_seconds, num_hangs)
    silence: _Silence | None = None
    try:
        while True:
            asking = asyncio.ensure_future(check.ask())
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=policy.period_seconds)
                    if silence is None and is_ready():
                        silence = _Silence(policy.period_seconds)
                    if silence is not None:
                        silence.grow()
                        if why := _too_long(child, silence, usual, is_ready(), policy):
                            return why
                with suppress(NoAnswer):
                    if why := asking.result():
                        return why
                    silence = _Silence(policy.period_seconds)
            finally:
                asking.cancel()
            await asyncio.sleep(policy.period_seconds)
    finally:
        await check.close()


def _too_long(
    child: Child, silence: "_Silence", usual: float, is_ready: bool, policy: LivenessPolicy
) -> str:
    if child.is_stopped and silence.seconds >= policy.stopped_share * usual:
        return f"it was stopped, and has answered no health check for {silence.seconds:.1f} s"
    if silence.seconds >= (usual if is_ready else max(policy.loading_seconds, usual)):
        return f"it has answered no health check for {silence.seconds:.1f} s"
    return ""


class _Silence:
    """Seconds since an answer, as far as this process ran in them."""

    def __init__(self, period_seconds: float) -> None:
        self.seconds = 0.0
        self._longest_turn = 3 * period_seconds
        self._loop = asyncio.get_running_loop()
        self._looked = self._loop.time()

    def grow(self) -> None:
        """Counts the time since the last look."""
        now = self._loop.time()
        self.seconds += min(now - self._looked, self._longest_turn)
        self._looked = now
