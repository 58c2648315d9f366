"""Selects the slowest requests of each minute, whose traces are kept."""

from services.gateway.core.traces.slowest_requests import SlowestRequests


def test_the_slowest_of_each_minute_are_among_those_selected() -> None:
    slowest = SlowestRequests(2)
    minute = [3.0, 9.0, 1.0, 4.0, 2.0, 9.5, 5.0]
    selected = [seconds for seconds in minute if slowest.is_among(seconds, 59.0)]
    assert selected == [3.0, 9.0, 4.0, 9.5]
    assert slowest.is_among(0.1, 60.0)
    assert not SlowestRequests(0).is_among(100.0, 0.0)
