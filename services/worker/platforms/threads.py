"""Chooses the number of threads with which a worker computes on the CPU.

The rules follow from measurements on two processors that run all four services, with a model of 135
million parameters and 8 and 32 requests at once:

* One thread reaches 0.70 (8 requests) and 0.60 (32 requests) of the tokens per second of two
  threads, although it leaves a processor to the other services. Therefore the worker uses both.
  Only if another process keeps a processor busy are one thread and two threads equally fast.
* A team of n threads waits for its last thread, so a process that occasionally uses a processor
  slows all n. Leaving a processor to such processes costs 1/n of the speed. From ENOUGH_TO_SPARE
  cores on, this loss is smaller, so one core is left free, unless idle hyperthreads of the cores in
  use can run the other services.
* A team that needs all processors pins one thread to each (native/cpp/threads.h). Otherwise two
  threads may be put on one processor, and on a virtual machine a prompt of 512 tokens after half a
  second of idleness takes up to twice as long.
* Two threads on one core share the core's arithmetic units and cache, so the worker starts one
  thread per core.
"""

from dataclasses import dataclass

from services.common.process.processors import Processors

ENOUGH_TO_SPARE = 8


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The number of threads, and the reason as a clause for the log. `processors` are the
    processors to which the threads are bound, or empty if the operating system places the threads.
    """

    num_threads: int
    reason: str
    processors: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''} ({self.reason})"


def choose_threads(
    processors: Processors, num_sharers: int = 1, asked: int | None = None
) -> ThreadChoice:
    """Chooses the number of threads, at least one, for one of `num_sharers` workers."""
    cores, reasons = _cores(processors)
    if cores >= ENOUGH_TO_SPARE and processors.num_allowed == processors.num_cores:
        cores -= 1
        reasons.append("one left to other services")
    if num_sharers > 1:
        cores //= num_sharers
        reasons.append(f"shared by {num_sharers} workers")
    chosen = ThreadChoice(max(cores, 1), ", ".join(reasons))
    if asked is None:
        return chosen
    return ThreadChoice(
        asked, f"as set by --num-threads; the default is {chosen.num_threads}: {chosen.reason}"
    )


def _cores(processors: Processors) -> tuple[int, list[str]]:
    cores, allowed = processors.num_cores, processors.num_allowed
    text = f"{cores} core{'s' if cores > 1 else ''}"
    reasons = [text if cores == allowed else f"{allowed} processors on {text}"]
    within = processors.within_quota(cores)
    if within < cores:
        reasons.append(f"a quota of {processors.quota:g}")
    return within, reasons
