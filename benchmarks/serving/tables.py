"""Tables of the cost of serving through separate services."""

from collections.abc import Mapping, Sequence

from benchmarks.common.tables import number_text, table_text
from benchmarks.serving.comparison import Row

HOPS_NOTE = (
    "A step is planned and sent while the one ahead computes: as long as it has to wait in the "
    "worker, the hops around computing cost processor time and no latency."
)


def serving_table(rows: Sequence[Row], reference: str = "one process") -> str:
    """A table of each target's latencies and throughput at each concurrency.

    `reference` is the name of the first target, to which throughput is compared.
    """
    return table_text(
        (
            "at once",
            "through",
            "TTFT ms, median / p99",
            "ITL ms, median / p99",
            "end to end ms",
            "tokens/s",
            f"tokens/s to {reference}",
        ),
        (
            (
                str(row.concurrency),
                row.target,
                f"{row.figures.ttft_median:.0f} / {row.figures.ttft_p99:.0f}",
                f"{row.figures.itl_median:.1f} / {row.figures.itl_p99:.1f}",
                f"{row.figures.e2e_median:.0f}",
                f"{row.figures.tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
    )


def neighbors_table(rows: Sequence[Row]) -> str:
    """A table of the measured requests, with a row for each kind of concurrent other requests."""
    return table_text(
        (
            "at once",
            "measured",
            "TTFT ms",
            "TPOT ms, median",
            "mean",
            "mean to unconstrained",
            "tokens/s",
            "tokens/s to unconstrained",
        ),
        (
            (
                str(row.concurrency),
                row.target,
                f"{row.figures.ttft_median:.1f}",
                f"{row.figures.tpot_median:.2f}",
                f"{row.figures.tpot_mean:.2f}",
                f"{row.tpot_ratio:.3f}",
                f"{row.figures.tokens_per_second:.0f}",
                f"{row.ratio:.3f}",
            )
            for row in rows
        ),
    )


def rounds_text(rows: Sequence[Row]) -> str:
    """A sentence with the number of rounds at each concurrency."""
    counts = {row.concurrency: row.num_rounds for row in rows}
    listed = ", ".join(f"{rounds} at {level}" for level, rounds in counts.items())
    return f"Medians of rounds in turns: {listed}."


def processor_table(rows: Sequence[Row]) -> str:
    """A table of each process's processor time per output token."""
    processes = list(dict.fromkeys(name for row in rows for name in row.processor_micros))
    return table_text(
        ("at once", "through", *processes),
        (
            (
                str(row.concurrency),
                row.target,
                *(number_text(row.processor_micros.get(name), 0) for name in processes),
            )
            for row in rows
        ),
    )


def tracing_table(rows: Sequence[Row]) -> str:
    """A table of latency and throughput with and without tracing."""
    return table_text(
        ("at once", "tracing", "ITL ms, median", "tokens/s", "tokens/s to off"),
        (
            (
                str(row.concurrency),
                row.target,
                f"{row.figures.itl_median:.2f}",
                f"{row.figures.tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
    )


def span_work_table(work: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """A table of the processor time of a step's spans in each service."""
    levels = list(dict.fromkeys(level for found in work.values() for level in found))
    services = list(dict.fromkeys(name for found in work.values() for name in found[levels[0]]))
    return table_text(
        ("processor µs per step", *(f"{name}, {level}" for name in services for level in levels)),
        (
            (label, *(f"{found[level][name]:.1f}" for name in services for level in levels))
            for label, found in work.items()
        ),
    )
