"""The times of a finished request, which are sent to its gateway."""

from services.common.telemetry.time_parts import TimePart
from services.scheduler.adapters.workers.converters import request_times_to_proto
from services.scheduler.core.timelines.timeline import RequestTimes


def test_a_clock_that_was_set_back_makes_no_part_negative() -> None:
    times = RequestTimes(-5, -7, 3, -1, 9, (TimePart("queue", -5), TimePart("decode", 3)))
    message = request_times_to_proto(times)
    assert message is not None
    assert (message.queue_nanos, message.prefill_nanos, message.decode_nanos) == (0, 0, 3)
    assert message.interrupted_nanos == 0
    assert [part.nanos for part in message.parts] == [0, 3]
