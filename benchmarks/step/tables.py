"""Tables of the overhead of steps, measured with a worker that computes nothing."""

from collections.abc import Sequence

from benchmarks.common.tables import number_text, table_text
from benchmarks.step.rounds import StepRow

OVERHEAD_NOTE = (
    "From the end of a step in the worker to the end of the next; medians over rounds. Processor "
    "time is per step."
)
HIDDEN_NOTE = (
    "Alone: the same wait in a bare loop, in the same thread, just before. Throughput is that of "
    "whole rounds, their median and the best of them."
)


def overhead_table(rows: Sequence[StepRow]) -> str:
    """A table of empty steps: the time between steps, and each process's processor time."""
    processes = list(rows[0].processor_micros)
    spent = (f"{name}, processor µs" for name in processes)
    return table_text(
        ("running", "scheduling", "step µs, median", "best round", "mean", *spent),
        (
            (
                str(row.running),
                row.mode,
                f"{row.median_micros:.0f}",
                f"{row.best_median_micros:.0f}",
                f"{row.mean_micros:.0f}",
                *(f"{row.processor_micros[name]:.0f}" for name in processes),
            )
            for row in rows
        ),
    )


def hidden_table(rows: Sequence[StepRow]) -> str:
    """A table of steps that take time in the worker, with throughput relative to a bare loop."""
    processes = list(rows[0].processor_micros)
    spent = (f"{name}, processor µs" for name in processes)
    return table_text(
        ("running", "scheduling", "step µs", "alone µs", "throughput to alone", "best", *spent),
        (
            (
                str(row.running),
                row.mode,
                number_text(row.mean_micros, 0),
                number_text(row.bare_micros, 0),
                number_text(row.ratio, 3),
                number_text(row.best_ratio, 3),
                *(f"{row.processor_micros[name]:.0f}" for name in processes),
            )
            for row in rows
        ),
    )
