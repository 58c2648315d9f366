"""A supervisor's time limits grow with the number of consecutive deaths of a child process."""

from services.cli.processes.liveness import LivenessPolicy
from services.cli.processes.supervisor import Deaths, End, RestartPolicy


def hung(ready_seconds: float) -> End:
    return End("killed by SIGKILL", ready_seconds, hung=True)


def test_the_bound_doubles_for_a_child_that_hangs_soon_after_it_is_ready() -> None:
    """A child that is ready for 30 s runs steadily. This one was ready for 3 s each time."""
    deaths, liveness, restarts = Deaths(steady_seconds=30), LivenessPolicy(), RestartPolicy()
    bounds, delays = [], []
    for _ in range(5):
        bounds.append(liveness.silence_seconds(2.0, deaths.num_hangs))
        deaths.ended([hung(ready_seconds=3.0)])
        delays.append(restarts.delay_seconds(deaths.num_in_a_row))
    assert bounds == [2, 2, 4, 8, 16]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6]


def test_half_a_minute_of_readiness_begins_a_new_row() -> None:
    deaths = Deaths(steady_seconds=30)
    for ready_seconds in (1.0, 0.0, 30.0):
        deaths.ended([hung(ready_seconds)])
    assert (deaths.num_in_a_row, deaths.num_hangs) == (1, 1)


def test_a_team_was_ready_for_as_long_as_the_last_of_it() -> None:
    deaths = Deaths(steady_seconds=30)
    deaths.ended([hung(40.0)])
    deaths.ended([hung(40.0), End("exit status 1", 0.0, hung=False)])
    assert (deaths.num_in_a_row, deaths.num_hangs) == (2, 2)
