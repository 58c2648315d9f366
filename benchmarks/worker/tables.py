"""The tables of benchmarks.worker, in Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks.common.tables import number_text, table_text
from benchmarks.worker.limits import LimitProbe
from benchmarks.worker.rounds import Comparison, is_time

IDLE_CORES = 0.05
"""The mean number of cores that an engine may use while another engine is measured. An engine that
uses more slows the measured engine down.
"""


def limits_text(probe: LimitProbe) -> str:
    """A sentence with the best and the median measurements of the machine's limits."""
    best, median = probe.best(), probe.median()
    return (
        f"Limits, measured before each round: {best.flops / 1e9:.0f} GFLOP/s in bfloat16, "
        f"{best.bytes_per_second / 1e9:.1f} GB/s read, at best; the median is "
        f"{median.flops / 1e9:.0f} and {median.bytes_per_second / 1e9:.1f}."
    )


def caption(compared: Comparison, left_out: Mapping[str, Sequence[str]]) -> str:
    """The table's caption: the number of rounds, the skipped loads, and the engines that used
    processor time while other engines were measured.
    """
    counts = {
        engine: {load: len(values) for load, values in loads.items()}
        for engine, loads in compared.rounds.items()
    }
    most = max(count for loads in counts.values() for count in loads.values())
    fewer = [
        f"{engine} {count} ({_brief(load)})"
        for engine, loads in counts.items()
        for load, count in loads.items()
        if count < most
    ]
    skipped = [f"{engine} ({_brief(load)})" for engine, loads in left_out.items() for load in loads]
    spinning = [
        f"{engine} ({cores:.2f} cores)"
        for engine, cores in compared.idle_cores.items()
        if cores > IDLE_CORES
    ]
    text = f"Medians of {most} rounds in turns"
    text += f"; fewer rounds of slow engines: {', '.join(fewer)}." if fewer else "."
    if skipped:
        text += f" Not measured, because these loads take minutes: {', '.join(skipped)}."
    if spinning:
        text += (
            f" **These engines used processors while others were measured: {', '.join(spinning)}.**"
        )
    return text


def table(limits: Mapping[str, float], compared: Comparison) -> str:
    """The limits, all engines' speeds, and Stepwell's ratio to the fastest other engine."""
    medians = compared.medians()
    loads = dict.fromkeys(load for figures in medians.values() for load in figures)
    ours = next(iter(medians))
    return table_text(
        ("load", "limit", *medians, f"{ours} to the fastest other"),
        (
            (
                load,
                *(
                    number_text(figures.get(load), 2 if is_time(load) else 0)
                    for figures in (limits, *medians.values())
                ),
                number_text(compared.lead(load), 2),
            )
            for load in loads
        ),
    )


def _brief(load: str) -> str:
    """The name of a load without its unit."""
    return load.rpartition(",")[0]
