"""Runs many seeds, and reports those that fail."""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from services.simulation.explore.plan import Plan, make_plan
from services.simulation.explore.run import CheckLog, Explorer, Report

_PREPARED_AT_ONCE = 10


def search(model: Path, seeds: Sequence[int], check_log: CheckLog) -> int:
    """Runs seeds. Prints the failures, and a digest of all logs. Returns the exit status."""
    explorer, digest, num_failed = Explorer(model, check_log), sha256(), 0
    gc.collect()
    gc.freeze()
    for start in range(0, len(seeds), _PREPARED_AT_ONCE):
        plans = [make_plan(seed) for seed in seeds[start : start + _PREPARED_AT_ONCE]]
        explorer.prepare(plans)
        for plan in plans:
            report = explorer.run(plan)
            digest.update("\n".join(report.lines).encode())
            if report.failures:
                num_failed += 1
                _complain(report)
    print(f"{len(seeds)} seeds, {num_failed} failed, digest of the logs {digest.hexdigest()[:16]}")
    return 1 if num_failed else 0


def replay(model: Path, seed: int, check_log: CheckLog) -> int:
    """Runs one seed and prints its log. If the run fails, prints the log of a smaller run that also
    fails. Returns the exit status.
    """
    explorer = Explorer(model, check_log)
    report = explorer.run(make_plan(seed))
    if report.failures:
        _complain(report)
        report = shrink(explorer, report)
        print(f"{len(report.plan.arrivals)} requests suffice, and these faults:", file=sys.stderr)
        for what in (*report.plan.faults, *report.failures):
            print(f"  {what}", file=sys.stderr)
    print("\n".join(report.lines))
    return 1 if report.failures else 0


def shrink(explorer: Explorer, report: Report) -> Report:
    """Removes faults, then requests, as long as the run still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for plan in _smaller(report.plan):
            smaller = explorer.run(plan)
            if smaller.failures:
                report, is_smaller = smaller, True
                break
    return report


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    half = len(plan.arrivals) // 2
    if half > 1:
        yield replace(plan, arrivals=plan.arrivals[:half])
        yield replace(plan, arrivals=plan.arrivals[half:])
    for index in range(len(plan.arrivals)):
        yield replace(plan, arrivals=plan.arrivals[:index] + plan.arrivals[index + 1 :])


def _complain(report: Report) -> None:
    seed = report.plan.seed
    print(f"seed {seed} failed: stepwell explore --seed {seed}", file=sys.stderr)
    for failure in report.failures:
        print(f"  {failure}", file=sys.stderr)
