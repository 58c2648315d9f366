"""Which log lines of a simulated run count as failures."""

from services.simulation.explore.lines import unexpected_line

WRONG = "2.5 gateway-0 WARNING session ended: a message of the scheduler is wrong: 4 rows"
WARNING = "2.0 gateway-0 WARNING scheduler scheduler-0:9001 is not ready: its pool is lost"
USUAL = "1.0 scheduler-0 INFO the session of gateway gateway-0 has begun"


REFUSED = "2.5 gateway-0 < scheduler-0:9001 /stepwell.scheduler.v1.Scheduler/Session status 3 open"
FAULT = "2.5 scheduler-0 < w:9003 /stepwell.worker.v1.Worker/Execute status 13 device simulated: f"
LOST = "2.5 gateway-0 < scheduler-0:9001 /stepwell.scheduler.v1.Scheduler/Session status 14 reset"


def test_a_wrong_message_is_unexpected_in_every_run() -> None:
    lines = [USUAL, WARNING, WRONG]
    assert unexpected_line(lines, is_calm=False) == WRONG
    assert unexpected_line(lines, is_calm=True) == WARNING
    assert unexpected_line([USUAL], is_calm=True) is None
    assert unexpected_line([USUAL, WARNING], is_calm=False) is None


def test_a_call_between_services_is_not_refused_as_invalid() -> None:
    assert unexpected_line([FAULT, LOST, REFUSED], is_calm=False) == REFUSED
    assert unexpected_line([FAULT, LOST], is_calm=False) is None
