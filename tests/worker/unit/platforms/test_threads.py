"""How many threads a worker uses on large, small and shared machines."""

import pytest

from services.common.process.processors import Processor, Processors
from services.worker.platforms.threads import ThreadChoice, choose_threads


def processors(number: int, num_cores: int, quota: float | None = None) -> Processors:
    return Processors(tuple(Processor(n, core=n % num_cores) for n in range(number)), quota)


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        (processors(1, 1), ThreadChoice(1, "1 core")),
        (processors(2, 2), ThreadChoice(2, "2 cores")),
        (processors(7, 7), ThreadChoice(7, "7 cores")),
        (processors(8, 8), ThreadChoice(7, "8 cores, one left to other services")),
        (processors(16, 8), ThreadChoice(8, "16 processors on 8 cores")),
        (processors(2, 1), ThreadChoice(1, "2 processors on 1 core")),
        (processors(64, 64, 1.5), ThreadChoice(2, "64 cores, a quota of 1.5")),
        (processors(64, 32, 0.5), ThreadChoice(1, "64 processors on 32 cores, a quota of 0.5")),
        (processors(4, 4, 16.0), ThreadChoice(4, "4 cores")),
    ],
)
def test_every_core_that_can_be_kept_busy_computes(
    processors: Processors, expected: ThreadChoice
) -> None:
    assert choose_threads(processors) == expected


def test_workers_on_one_machine_share_its_cores() -> None:
    shared = choose_threads(processors(8, 8), num_sharers=2)
    assert shared == ThreadChoice(3, "8 cores, one left to other services, shared by 2 workers")
    assert choose_threads(processors(2, 2), num_sharers=4).num_threads == 1


def test_a_requested_number_is_used_and_the_default_is_logged() -> None:
    asked = choose_threads(processors(2, 2), asked=5)
    assert asked == ThreadChoice(5, "as set by --num-threads; the default is 2: 2 cores")
    assert str(asked) == "5 threads (as set by --num-threads; the default is 2: 2 cores)"
    assert str(choose_threads(processors(1, 1))) == "1 thread (1 core)"
