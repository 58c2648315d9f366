"""Detects a hung child, which does not reply to health checks or replies that it is not live."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.cli.health import NoAnswer, why_not_live, why_unreachable
from services.cli.processes.child import Child
from services.common.process.watchdog.proc import watch_pids
from services.common.process.watchdog.silence import Silence
from services.common.rpc.channel import open_channel


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """Limits on a child's silence, in seconds. Only time in which the child could have replied
    counts as silence (see `Silence`). Silence has no limit before the child's first reply to a
    liveness or readiness check.
    """

    factor: float = 2.0
    """The limit is multiplied by this factor for each consecutive hang after the first, because
    kills and restarts add load to a slow machine.
    """
    longest_seconds: float = 60.0
    """The multiplied limit does not exceed this value, or the child's own limit if that is longer.
    """
    loading_seconds: float = 60.0
    """The minimum of the limit for a child that is not ready yet."""
    stopped_share: float = 0.5
    """If a signal has stopped the process, the limit is multiplied by this factor."""
    pause_seconds: float = 0.6
    """Time between a reply and the next check."""
    period_seconds: float = 0.2
    """Time between two measurements of a child's silence."""

    @property
    def longest_turn_seconds(self) -> float:
        """Of the time between two measurements, at most this many seconds count as silence."""
        return 2 * self.pause_seconds

    def silence_seconds(self, usual_seconds: float, num_hangs: int) -> float:
        """The limit on a child's silence, in seconds, after `num_hangs` consecutive hangs."""
        longest = max(self.longest_seconds, usual_seconds)
        return float(min(usual_seconds * self.factor ** max(0, num_hangs - 1), longest))


async def until_hung(
    child: Child, is_ready: Callable[[], bool], num_hangs: int, policy: LivenessPolicy
) -> str:
    """Checks a child until it hangs. Returns the reason. `num_hangs` counts consecutive hangs."""
    address = child.spec.liveness_address
    assert address is not None
    watch = _Watch(child, is_ready, num_hangs, policy)
    async with open_channel(address) as channel:
        while True:
            asking = asyncio.ensure_future(why_not_live(channel, address))
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=policy.period_seconds)
                    if not asking.done() and (why := watch.why_too_silent()):
                        return why
                if why := asking.result():
                    return why
                watch.answered()
            except NoAnswer:
                if why := watch.why_too_silent():
                    return why
            finally:
                asking.cancel()
            await asyncio.sleep(policy.pause_seconds)


class _Watch:
    """Measures the silence of a child since its last reply."""

    def __init__(
        self, child: Child, is_ready: Callable[[], bool], num_hangs: int, policy: LivenessPolicy
    ) -> None:
        self._child = child
        self._is_ready = is_ready
        self._policy = policy
        self._usual = policy.silence_seconds(child.spec.silence_seconds, num_hangs)
        self._read, self._now = watch_pids([child.pid]), asyncio.get_running_loop().time
        self._silence: Silence | None = None
        self._has_answered = False

    def answered(self) -> None:
        self._silence = self._silence_since(self._now())
        self._has_answered = True

    def why_too_silent(self) -> str:
        """Measures the silence until now. Returns an error text if it is too long, otherwise ""."""
        reading = self._read(self._now())
        is_stopped = any(process.is_stopped for process in reading.watched)
        self._has_answered = self._has_answered or self._is_ready()
        if not (self._has_answered or is_stopped):
            self._silence = None
            return ""
        if self._silence is None:
            self._silence = self._silence_since(reading.now)
        seconds = self._silence.look(reading)
        if is_stopped and seconds >= self._policy.stopped_share * self._child.spec.silence_seconds:
            return f"the process was stopped, and has answered no health check for {seconds:.1f} s"
        if seconds >= self._bound_seconds:
            removed = why_unreachable(self._child.spec.liveness_address or "")
            return removed or f"the process has answered no health check for {seconds:.1f} s"
        return ""

    def _silence_since(self, began: float) -> Silence:
        longest = self._policy.longest_turn_seconds
        return Silence(began, longest_first_seconds=longest, longest_turn_seconds=longest)

    @property
    def _bound_seconds(self) -> float:
        return self._usual if self._is_ready() else max(self._policy.loading_seconds, self._usual)
