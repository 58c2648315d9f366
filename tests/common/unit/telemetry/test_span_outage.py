"""The log reports when spans begin to be dropped, and when this ends."""

from collections import Counter

import pytest

from services.common.telemetry.span_outage import DropReason, SpanOutage


def test_a_collector_that_takes_some_spans_between_drops_is_one_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage, dropped = SpanOutage(), Counter({DropReason.NOT_TAKEN: 5})
    outage.exported(dropped, "it hangs", is_caught_up=True)
    outage.exported(dropped, None, is_caught_up=True)
    caplog.clear()

    dropped[DropReason.QUEUE_FULL] += 7
    outage.exported(dropped, None, is_caught_up=False)
    outage.exported(dropped, None, is_caught_up=False)
    dropped[DropReason.QUEUE_FULL] += 2
    outage.exported(dropped, None, is_caught_up=True)
    assert caplog.messages == [
        "spans are dropped: the service produces spans faster than the collector accepts them"
    ]
    outage.exported(dropped, None, is_caught_up=True)
    outage.exported(dropped, None, is_caught_up=True)
    outage.stopped(dropped)
    assert caplog.messages[1:] == [
        "the collector accepts spans again: 9 spans were dropped (9 queue_full)"
    ]


def test_an_end_in_an_outage_says_what_was_dropped_by_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage, dropped = SpanOutage(), Counter({DropReason.NOT_TAKEN: 5})
    outage.exported(dropped, "it hangs", is_caught_up=True)
    dropped[DropReason.SHUTDOWN] += 3
    outage.stopped(dropped)
    assert caplog.messages == [
        "spans are dropped: it hangs",
        "the service stops while the collector does not accept its spans: 8 spans were dropped (5 "
        "not_taken, 3 shutdown)",
    ]


def test_an_end_before_the_first_answer_of_a_collector_says_what_was_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage, dropped = SpanOutage(), Counter[DropReason]()
    outage.exported(dropped, None, is_caught_up=True)
    dropped.update({DropReason.QUEUE_FULL: 1550, DropReason.SHUTDOWN: 2048})
    outage.stopped(dropped)
    assert caplog.messages == [
        "the service stops while the collector does not accept its spans: 3598 spans "
        "were dropped (1550 queue_full, 2048 shutdown)"
    ]


def test_an_end_at_which_all_was_taken_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outage, dropped = SpanOutage(), Counter({DropReason.QUEUE_FULL: 3})
    outage.exported(dropped, None, is_caught_up=True)
    outage.exported(dropped, None, is_caught_up=True)
    outage.stopped(dropped)
    assert caplog.messages[1:] == [
        "the collector accepts spans again: 3 spans were dropped (3 queue_full)"
    ]
