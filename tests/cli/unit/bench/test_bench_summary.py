"""The summary of a run of `stepwell bench`: a worked example, goodput, and numpy's values."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.core.record import Failure, RequestRecord
from services.cli.bench.core.result import request_rows, summary_document
from services.cli.bench.core.summary import is_good, parse_objective, summarize


def answered(intended: float, times: list[float], **changes: object) -> RequestRecord:
    """A request whose tokens arrived at `times`, one token each."""
    record = RequestRecord(0, 0, 0, is_warmup=False, intended=intended, output_len=len(times))
    record.sent = intended
    record.token_times = array("d", times)
    record.ended = times[-1]
    record.num_output_tokens = len(times)
    record.num_input_tokens = 10
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_a_summary_counts_what_succeeded_after_the_warm_up() -> None:
    """A warm-up, which does not count, answers of three and of two tokens, and three refusals."""
    records = [
        answered(0.0, [9.0, 9.5], is_warmup=True),
        answered(1.0, [1.2, 1.3, 1.5], num_cached_tokens=4),
        answered(2.0, [2.4, 3.0], sent=2.1),
        answered(2.0, [2.0], ended=None, failure=Failure("http 429")),
        answered(2.0, [2.0], ended=None, failure=Failure("http 429", "later")),
        answered(2.0, [2.0], ended=None, failure=Failure("http 429", "much later")),
    ]
    summary = summarize(records, {"ttft": 200.0})
    assert (summary.completed, summary.failed, summary.failures) == (2, 3, {"http 429": 3})
    assert summary.failure_messages == {"http 429": "later"}
    assert summary.duration_seconds == 2.0
    assert summary.request_throughput == 1.0
    assert summary.output_throughput == 2.5
    assert summary.total_token_throughput == 12.5
    assert summary.request_goodput == 0.5
    assert summary.max_concurrent_requests == 1
    assert summary.total_cached_tokens == 4
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(300)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == pytest.approx((150 + 600) / 2)
    assert summary.itl_ms is not None
    assert summary.itl_ms.count == 3
    assert summary.e2el_ms is not None
    assert summary.e2el_ms.max == pytest.approx(1000)
    assert summary.schedule_lag_ms is not None
    assert summary.schedule_lag_ms.max == pytest.approx(100)


def test_nothing_measured_is_nothing_known() -> None:
    summary = summarize([], {})
    assert (summary.completed, summary.ttft_ms, summary.request_goodput) == (0, None, None)
    assert summary.request_throughput == 0


def test_several_tokens_in_an_event_are_one_gap_but_count_for_the_time_per_token() -> None:
    record = answered(0.0, [1.0, 2.0], num_output_tokens=5)
    assert record.itls == [1.0]
    assert record.tpot == 0.25


ANSWERS = st.lists(
    st.tuples(
        st.floats(0, 100), st.lists(st.floats(0.001, 10), min_size=1, max_size=8).map(np.cumsum)
    ),
    min_size=1,
    max_size=20,
)


@given(ANSWERS)
def test_figures_are_those_of_numpy(answers: list[tuple[float, np.ndarray]]) -> None:
    records = [answered(begin, list(begin + offsets)) for begin, offsets in answers]
    summary = summarize(records, {})
    ttfts = [1000 * offsets[0] for _, offsets in answers]
    itls = np.concatenate([1000 * np.diff(offsets) for _, offsets in answers])
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.percentiles[99] == pytest.approx(np.percentile(ttfts, 99), rel=1e-6)
    if len(itls):
        assert summary.itl_ms is not None
        assert summary.itl_ms.mean == pytest.approx(float(np.mean(itls)), rel=1e-6)
    begin = min(begin for begin, _ in answers)
    end = max(begin + offsets[-1] for begin, offsets in answers)
    assert summary.duration_seconds == pytest.approx(end - begin)


def test_a_good_request_meets_every_objective() -> None:
    record = answered(0.0, [0.1, 0.2, 0.3])
    assert is_good(record, {"ttft": 100.1, "tpot": 100.1, "e2el": 300.1})
    assert not is_good(record, {"ttft": 100.1, "tpot": 99.0})
    assert not is_good(answered(0.0, [0.1], failure=Failure("broken")), {"ttft": 1000.0})
    assert is_good(answered(0.0, [0.1]), {"tpot": 0.001})


def test_objectives_are_written_as_for_vllm() -> None:
    assert parse_objective("ttft:200") == ("ttft", 200.0)
    assert parse_objective("e2e:3000") == parse_objective("e2el:3000") == ("e2el", 3000.0)
    for text in ("ttft", "ttft:", "ttft:-1", "latency:3", "tpot:nan"):
        with pytest.raises(ValueError, match="must be one of"):
            parse_objective(text)


def test_the_document_has_every_figure_and_every_request() -> None:
    records = [answered(1.0, [1.25, 1.5]), answered(0.0, [0.5])]
    records[0].number, records[1].number = 1, 0
    document = summary_document(summarize(records, {}))
    assert document["ttft_ms"]["p50"] == 375
    assert document["completed"] == 2
    rows = request_rows(records)
    assert [row["number"] for row in rows] == [0, 1]
    assert (rows[1]["ttft_ms"], rows[1]["itl_ms"], rows[1]["tpot_ms"]) == (250, [250], 250)
