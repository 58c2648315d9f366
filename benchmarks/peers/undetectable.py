"""Faults that no receiver can see: one valid value of a message in place of another."""

from benchmarks.peers.faults import Fault

UNDETECTABLE: dict[str, str] = {}
"""Changes by `Lane: path: change`, or by `Lane: path` for every change of a field, each with the
reason why the receiver cannot see it.
"""


def why_undetectable(fault: Fault) -> str:
    """The reason; empty for a fault that must be seen, or change nothing."""
    place = f"{fault.lane}: {'.'.join(fault.path)}"
    return UNDETECTABLE.get(str(fault), UNDETECTABLE.get(place, ""))
