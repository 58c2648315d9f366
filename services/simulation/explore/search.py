"""Runs many seeds, and reports those that fail."""

import gc
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from services.simulation.explore.run import Explorer, Report

_PREPARED_AT_ONCE = 100


def search(model: Path, seeds: Sequence[int], *, prints_log: bool) -> int:
    """Runs seeds. Prints failures, and a digest of all logs. Returns the exit status."""
    explorer, digest, num_failed = Explorer(model), sha256(), 0
    gc.collect()
    gc.freeze()
    for start in range(0, len(seeds), _PREPARED_AT_ONCE):
        chunk = seeds[start : start + _PREPARED_AT_ONCE]
        explorer.prepare(chunk)
        for seed in chunk:
            report = explorer.run(seed)
            digest.update("\n".join(report.lines).encode())
            if prints_log:
                print("\n".join(report.lines))
            if report.failures:
                num_failed += 1
                _complain(report)
    print(f"{len(seeds)} seeds, {num_failed} failed, digest of the logs {digest.hexdigest()[:16]}")
    return 1 if num_failed else 0


def _complain(report: Report) -> None:
    print(f"seed {report.seed} failed: stepwell explore --seed {report.seed}", file=sys.stderr)
    for failure in report.failures:
        print(f"  {failure}", file=sys.stderr)
