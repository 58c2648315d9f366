"""In every API, an answer can contain the parts of its request's time, which add up."""

import json
from pathlib import Path
from typing import Any

import pytest
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving

MILLIS = 1_000_000
TIMES = scheduler_pb2.RequestTimes(
    queue_nanos=1 * MILLIS,
    prefill_nanos=2 * MILLIS,
    decode_nanos=3 * MILLIS,
    parts=[
        scheduler_pb2.TimePart(name="blocks", nanos=MILLIS, waited_for="cmpl-other", step=7),
        scheduler_pb2.TimePart(name="prefill", nanos=2 * MILLIS),
        scheduler_pb2.TimePart(name="decode", nanos=3 * MILLIS),
    ],
)
MESSAGES = [{"role": "user", "content": "hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}


async def answer(served: Serving, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await served.http.post(path, json=CALLS[path] | fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return [response.json()]
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def metrics_in(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bodies = [event.get("response", event) for event in events]
    return [body["metrics"] for body in bodies if "metrics" in body]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", CALLS)
async def test_an_answer_has_its_times_once_where_they_are_asked_for(
    model: Path, path: str, stream: bool
) -> None:
    async with serving(model, FakeScheduler(times=TIMES)) as served:
        assert metrics_in(await answer(served, path, stream=stream)) == []
        (metrics,) = metrics_in(await answer(served, path, stream=stream, include_metrics=True))
    parts = metrics["parts"]
    assert {"blocks", "gateway"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(metrics["seconds"])
    assert metrics["line"].split(" = ")[1].startswith("blocks ")
    assert (metrics["queue_time_ms"], metrics["time_to_first_token_ms"]) == (1, 2)
    assert (metrics["generation_time_ms"], metrics["mean_itl_ms"]) == (3, 1)
    assert metrics["tokens_per_second"] == pytest.approx(4 / 0.005)


async def test_an_answer_that_a_stop_string_ends_has_what_the_gateway_saw(model: Path) -> None:
    async with serving(model, FakeScheduler(answer=[11, 12, 13, 14])) as served:
        (whole,) = await answer(served, "/v1/completions", max_tokens=3)
        stop = whole["choices"][0]["text"][1:2]
        (stopped,) = await answer(served, "/v1/completions", stop=stop, include_metrics=True)
    metrics = stopped["metrics"]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert metrics["queue_time_ms"] is None
    assert sum(metrics["parts"].values()) == pytest.approx(metrics["seconds"])


async def test_over_grpc_the_last_piece_of_each_answer_has_them(model: Path) -> None:
    async with serving(model, FakeScheduler(times=TIMES)) as served:
        request = gateway_pb2.GenerateRequest(text="hi", n=2, include_metrics=True)
        request.sampling.max_tokens = 3
        pieces = [piece async for piece in served.stub.Generate(request)]
    last = [piece for piece in pieces if piece.finish_reason]
    assert len(last) == 2
    assert all(piece.HasField("metrics") == (piece in last) for piece in pieces)
    for piece in last:
        parts = {part.name: part.seconds for part in piece.metrics.parts}
        assert sum(parts.values()) == pytest.approx(piece.metrics.seconds)
        assert "gateway" in parts
