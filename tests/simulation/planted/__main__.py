"""`python -m tests.simulation.planted` plants each known defect in a copy of the services, runs
`stepwell explore` on seeds until one fails, and prints a table of the failing seeds.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simulation.planted.defects import ROOT, Defect, all_defects

_ROUNDS = (20, 100)
"""All defects are searched for with the first of these numbers of seeds. Defects that are not found
are searched for with the second number, and then with `--seeds`.
"""
_LONGEST_COMPLAINT = 160
_MAX_PROCESSOR_SECONDS = (60, 12)
"""The processor time that a search may use: a constant part, and a part for each seed."""


@dataclass(slots=True)
class Finding:
    seed: int | None = None
    """The first seed that fails. None if no seed fails."""
    complaint: str = ""
    """The first line that the search printed about the failure of `seed`."""
    processor_seconds: float = 0.0


def find(defect: Defect, finding: Finding, seeds: range) -> None:
    """Runs `seeds` with a defect until one fails, and writes the result into `finding`."""
    before = _processor_seconds()
    with TemporaryDirectory() as directory:
        tree = _copy_to(Path(directory))
        defect.plant(tree)
        finding.seed, finding.complaint = _search(tree, seeds)
    finding.processor_seconds += _processor_seconds() - before


def check_without_defects() -> None:
    """Ends the program if one of the first seeds fails without a defect, for example because the
    copy lacks a file. Otherwise each defect would count as found.
    """
    with TemporaryDirectory() as directory:
        seed, complaint = _search(_copy_to(Path(directory)), range(_ROUNDS[0]))
    if seed is not None:
        sys.exit(f"seed {seed} fails without a defect: {complaint}")


def _copy_to(tree: Path) -> Path:
    subprocess.run(["cp", "-a", "--reflink=auto", ROOT / "services", tree], check=True)
    for name in ("deploy", "gen", "models"):
        (tree / name).symlink_to(ROOT / name)
    return tree


def _search(tree: Path, seeds: range) -> tuple[int | None, str]:
    """Runs `seeds` in `tree` up to the first failure. Returns the failed seed and its output's
    first line.
    """
    start, of_seed = _MAX_PROCESSOR_SECONDS
    limit = f"--cpu={start + of_seed * len(seeds)}"
    command = ["prlimit", limit, sys.executable, "-m", "services.cli", "explore"]
    command += ["--first", str(seeds[0]), "--seeds", str(len(seeds))]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{tree / 'gen'}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        seed, line = None, ""
        for line in process.stderr:
            if seed is not None:
                process.kill()
                return seed, line.strip()
            if match := re.match(r"seed (\d+) failed", line):
                seed = int(match[1])
    if process.returncode == 0:
        return None, ""
    return seeds[0], line.strip() or f"the search ends with status {process.returncode}"


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of defects (default: all)")
    parser.add_argument("--seeds", type=int, default=1000, help="most seeds for a defect")
    arguments = parser.parse_args()
    defects = [one for one in all_defects() if one.name in arguments.names or not arguments.names]
    check_without_defects()
    findings = {defect: Finding() for defect in defects}
    ends = sorted({min(end, arguments.seeds) for end in (*_ROUNDS, arguments.seeds)})
    for first, end in pairwise([0, *ends]):
        for defect, finding in findings.items():
            if finding.seed is None:
                find(defect, finding, range(first, end))
                print(_row(defect, finding), file=sys.stderr, flush=True)
    print("| defect | in | first seed | s | complaint |\n|---|---|---:|---:|---|")
    for defect, finding in findings.items():
        print(_row(defect, finding))
    num_found = sum(finding.seed is not None for finding in findings.values())
    print(f"\n{num_found} of {len(defects)} found within {arguments.seeds} seeds")


def _row(defect: Defect, finding: Finding) -> str:
    seed = "none" if finding.seed is None else finding.seed
    complaint = finding.complaint.replace("|", "\\|")[:_LONGEST_COMPLAINT]
    where = defect.path.split("/")[1]
    return f"| {defect.name} | {where} | {seed} | {finding.processor_seconds:.0f} | {complaint} |"


if __name__ == "__main__":
    main()
