"""Faults of the simulated device, which a script defines.

A script has rules, one in each line, or separated by semicolons. A rule consists of the time of a
fault, a colon, and the fault. `#` begins a comment.

    after 30 s: hang 5 s              once, in the first step after 30 seconds
    every 1 min: slow 3x for 10 s
    every 1000th step: fail
    at step 500: exit 3
    at start: refuse memory
    rank 1 after 30 s: hang           only on rank 1
    replica 1 at step 9: exit         only in local replica 1

Times and steps are counted from the first step of the worker's process, so that rules apply again
after a restart. Steps without tokens are not counted.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import Path

from services.common.errors import InternalError
from services.common.process.settings import SettingError
from services.worker.backends.out_of_memory import NotEnoughMemory
from services.worker.options.simulated.device import SimulatedDevice

_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_TIME = r"(\d+(?:\.\d+)?) ?(ms|s|min)"
_WHERE = re.compile(r"(rank|replica) (\d+) ")
_WHEN = re.compile(
    rf"(at start)|(after|every) {_TIME}|at step ([1-9]\d*)|every ([1-9]\d*)(?:st|nd|rd|th) step"
)
_WHAT = re.compile(
    rf"(hang)(?: {_TIME})?|(slow) (\d+(?:\.\d+)?)x for {_TIME}"
    r"|(exit)(?: (\d+))?|(fail|refuse memory)"
)
_AT_START = ("hang", "exit", "fail", "refuse memory")


class DeviceFault(InternalError):
    """A fault of a script made a step of the simulated device fail."""

    reason = "DEVICE_FAULT"


class Counter(Enum):
    """What a rule counts: seconds or steps, or neither for faults at the start."""

    STARTS = "starts"
    SECONDS = "seconds"
    STEPS = "steps"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `kind` is its first word or words. `factor` is the slowdown or the exit status."""

    kind: str
    seconds: float = inf
    factor: float = 1


@dataclass(slots=True)
class Rule:
    """A fault that happens when the counter reaches `due`, and then at multiples of `period`."""

    text: str
    counter: Counter
    due: float
    period: float | None
    fault: Fault

    def is_due(self, count: float) -> bool:
        """Whether the fault happens now. If so, advances `due` by the period."""
        if count < self.due:
            return False
        self.due = inf if self.period is None else (count // self.period + 1) * self.period
        return True


@dataclass(eq=False)
class Faults:
    """Injects faults into a device. `end_process` ends the process with an exit status."""

    rules: Sequence[Rule]
    device: SimulatedDevice
    end_process: Callable[[int], object] = os._exit
    _began: float | None = None
    _num_steps: int = 0
    _slow_until: float = field(default=inf)

    def at_start(self) -> None:
        """Injects the faults that are due at the start. Raises DeviceFault and NotEnoughMemory."""
        for rule in self.rules:
            if rule.counter is Counter.STARTS:
                self.device.begin_step()
                self._inject(rule, "the start")
                self.device.wait_until(self.device.ends)

    def at_step(self) -> None:
        """Injects the faults that are due in a step, before the step's work is queued. Raises
        DeviceFault for a failing step, and NotEnoughMemory.
        """
        now = self.device.clock()
        if self._began is None:
            self._began = now
        if now >= self._slow_until:
            self.device.slowness, self._slow_until = 1.0, inf
        self._num_steps += 1
        counts: Mapping[Counter, float] = {
            Counter.STARTS: -inf,
            Counter.SECONDS: now - self._began,
            Counter.STEPS: self._num_steps,
        }
        due = [rule for rule in self.rules if rule.is_due(counts[rule.counter])]
        for rule in due:
            self._inject(rule, f"step {self._num_steps}")

    def _inject(self, rule: Rule, where: str) -> None:
        fault, text = rule.fault, f"device simulated: {where}: {rule.text}"
        match fault.kind:
            case "hang":
                self.device.queue(fault.seconds / self.device.slowness)
            case "slow":
                self.device.slowness = fault.factor
                self._slow_until = self.device.clock() + fault.seconds
            case "exit":
                self.end_process(int(fault.factor))
            case "refuse memory":
                raise NotEnoughMemory(text)
            case _:
                raise DeviceFault(text)


def read_rules(script: str, rank: int, replica: int) -> list[Rule]:
    """Reads a script's rules for one rank of a local replica. `script` may also be the path of a
    script, which is recognized because it has no colon. Raises SettingError.
    """
    if script and ":" not in script:
        try:
            script = Path(script).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                f"--device-faults {script}: neither a rule such as 'after 30 s: hang 5 s', nor a "
                f"file that can be read: {error}"
            ) from error
    own = {"rank": rank, "replica": replica}
    return [rule for text in _texts(script) if (rule := _read_rule(text, own)) is not None]


def _texts(script: str) -> Iterable[str]:
    for line in script.splitlines():
        for text in line.partition("#")[0].split(";"):
            if text.strip():
                yield " ".join(text.split())


def _read_rule(text: str, own: Mapping[str, int]) -> Rule | None:
    when, colon, what = text.partition(":")
    where = _WHERE.match(when)
    due = _WHEN.fullmatch(when[where.end() if where else 0 :].strip())
    found = _WHAT.fullmatch(what.strip())
    if not colon or due is None:
        raise _error(
            text,
            f"{when!r} is not a time: it may be 'at start', 'after 30 s', 'every 30 s', 'at step "
            "500' or 'every 1000th step', after 'rank 0' or 'replica 0'",
        )
    if found is None:
        raise _error(
            text,
            f"{what.strip()!r} is not a fault: it may be 'hang', 'hang 5 s', 'slow 3x for 10 s', "
            "'fail', 'exit', 'exit 3' or 'refuse memory'",
        )
    fault = _fault(found)
    at_start, word, amount, unit, step, nth = due.groups()
    if at_start and fault.kind not in _AT_START:
        raise _error(text, f"{fault.kind!r} is not possible at start")
    if where is not None and own[where[1]] != int(where[2]):
        return None
    if at_start:
        return Rule(text, Counter.STARTS, inf, None, fault)
    if word:
        seconds = float(amount) * _UNITS[unit]
        if word == "every" and not seconds:
            raise _error(text, f"{amount} {unit} must be above 0")
        return Rule(text, Counter.SECONDS, seconds, seconds if word == "every" else None, fault)
    return Rule(text, Counter.STEPS, int(step or nth), int(nth) if nth else None, fault)


def _fault(found: "re.Match[str]") -> Fault:
    hang, hangs, hangs_unit, slow, factor, slows, slows_unit, ends, status, other = found.groups()
    if hang:
        return Fault(hang, float(hangs) * _UNITS[hangs_unit] if hangs else inf)
    if slow:
        return Fault(slow, float(slows) * _UNITS[slows_unit], float(factor))
    return Fault(ends or other, factor=int(status or 1))


def _error(text: str, problem: str) -> SettingError:
    return SettingError(f"--device-faults {text!r}: {problem}")
