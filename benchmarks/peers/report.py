"""The report of a sweep of faults."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.tables import table_text
from benchmarks.peers.faults import Fault
from benchmarks.peers.undetectable import why_undetectable

HEAL_SECONDS = 5.0
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Effect:
    """The effects of one fault on the services' processes, answers and logs, and on the link."""

    fault: Fault
    ended: tuple[str, ...] = ()
    """Names of the processes that ended."""
    wrong: tuple[str, ...] = ()
    """Descriptions of answers that failed or changed."""
    lines: tuple[str, ...] = ()
    """Warnings and errors in the services' logs."""
    heal_seconds: float = 0.0
    """Seconds from the fault until all answers had ended and the link carried messages again."""

    @property
    def is_bad(self) -> bool:
        if self.ended or self.heal_seconds > HEAL_SECONDS:
            return True
        return bool(self.wrong) and not why_undetectable(self.fault)

    @property
    def is_noisy(self) -> bool:
        services = [line.partition(":")[0] for line in self.lines]
        return len(services) > len(set(services))

    def __str__(self) -> str:
        found = [
            *_in_short("ended", self.ended),
            *_in_short("wrong", self.wrong),
            *_in_short("logged", self.lines),
        ]
        return "; ".join([f"{self.fault} ({self.heal_seconds:.2f} s)", *found])


def _in_short(kind: str, texts: Sequence[str]) -> list[str]:
    left = len(texts) - _MOST_SHOWN
    more = [f"and {left} more"] if left > 0 else []
    return [f"{kind}: {text}" for text in texts[:_MOST_SHOWN]] + more


def report(effects: Sequence[Effect], num_unseen: int, num_tried: int) -> str:
    """A table with a row for each lane (a method's messages in one direction), and a list of the
    faults with forbidden effects.
    """
    rows = []
    for lane in sorted({str(effect.fault.lane) for effect in effects}):
        of_lane = [effect for effect in effects if str(effect.fault.lane) == lane]
        rows.append(
            (
                lane,
                str(len(of_lane)),
                str(sum(len(effect.ended) for effect in of_lane)),
                str(sum(bool(effect.wrong) for effect in of_lane)),
                str(sum(bool(e.wrong and why_undetectable(e.fault)) for e in of_lane)),
                str(sum(effect.is_noisy for effect in of_lane)),
                f"{max(effect.heal_seconds for effect in of_lane):.2f}",
            )
        )
    counts = ("faults", "processes ended", "with wrong answers", "of these undetectable")
    head = ("messages", *counts, "more than one line of a service", "longest time to heal, s")
    bad = [str(effect) for effect in effects if effect.is_bad]
    seen = f"{num_tried - num_unseen} of {num_tried} faults happened; the others found no message"
    return "\n\n".join((table_text(head, rows), seen, *bad))
