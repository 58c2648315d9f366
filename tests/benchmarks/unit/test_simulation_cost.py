"""The benchmark of `stepwell simulate` counts requests and decisions."""

from benchmarks.simulation.__main__ import measure, table
from tests.simulation.laboratory.small import UNIT


def test_requests_after_the_first_quarter_of_the_programs_are_measured() -> None:
    cost = measure(2, 80, UNIT)  # 40 programs of 1 to 4 turns
    assert 30 <= cost.num_requests <= 120
    # At least two steps are planned and one replica is chosen for each request.
    assert cost.num_decisions >= 3 * cost.num_requests
    assert cost.processor_seconds > 0 < cost.other_seconds
    assert table([cost]).splitlines()[2].startswith("| 2 |")
