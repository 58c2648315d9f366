"""Grammars that a worker receives ahead of a step are compiled outside of steps."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.request.structured_outputs import StructuredOutputs
from services.common.rpc.channel import open_channel
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.sampling.grammar import Grammars
from services.worker.settings import WorkerSettings
from tests.worker.serving_worker import ServingWorker

DEMO = Path(__file__).parents[3] / "models" / "demo"
PROMPT = [40, 41, 42]
YES_OR_NO = common_pb2.StructuredOutputs(
    kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text="yes|no"
)
WRONG = common_pb2.StructuredOutputs(kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text="(")


def packed(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def unpacked(array: bytes) -> list[int]:
    return np.frombuffer(array, "<i4").tolist()


@pytest.fixture(scope="module")
def worker() -> Worker:
    settings = WorkerSettings(model=DEMO, num_blocks=20, num_threads=1, dtype="float32")
    return build_worker(settings, "w", lambda: None)


@pytest.fixture
def compiled(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputs]:
    """Empties the worker's grammar cache. Returns a list of the grammars that it compiles later."""
    grammars, found = worker.grammars, list[StructuredOutputs]()
    assert grammars is not None
    compile_one = grammars._compile

    def noted(wanted: StructuredOutputs) -> object:
        found.append(wanted)
        return compile_one(wanted)

    monkeypatch.setattr(grammars, "_compile", noted)
    grammars._cached.clear()
    return found


@pytest.fixture
async def stub(worker: Worker) -> AsyncIterator[worker_pb2_grpc.WorkerStub]:
    serving = ServingWorker(worker)
    channel = open_channel(await serving.start())
    yield worker_pb2_grpc.WorkerStub(channel)
    await channel.close()
    await serving.stop()


def first_step(**sampling: object) -> Iterator[worker_pb2.ExecuteRequest]:
    params = {"temperature": 0, "structured_outputs": YES_OR_NO, **sampling}
    yield worker_pb2.ExecuteRequest(
        generation=1,
        step=1,
        new_requests=[
            worker_pb2.NewRequest(
                row=0,
                token_ids=packed(*PROMPT),
                num_prompt_tokens=len(PROMPT),
                sampling=common_pb2.SamplingParams(**params),
                block_tables=[worker_pb2.BlockTable(block_ids=packed(1))],
            )
        ],
        rows=packed(0),
        num_scheduled_tokens=packed(len(PROMPT)),
        num_computed_tokens=packed(0),
    )


async def run(stub: worker_pb2_grpc.WorkerStub, **sampling: object) -> worker_pb2.ExecuteResponse:
    (response,) = [one async for one in stub.Execute(first_step(**sampling), timeout=30)]
    return response


async def test_a_step_uses_a_prepared_grammar(
    stub: worker_pb2_grpc.WorkerStub, worker: Worker, compiled: list[StructuredOutputs]
) -> None:
    request = worker_pb2.PrepareGrammarRequest(structured_outputs=YES_OR_NO)
    for _ in range(2):
        await stub.PrepareGrammar(request, timeout=30)
    assert len(compiled) == 1
    response = await run(stub)
    assert len(compiled) == 1
    assert unpacked(response.refused_requests) == []

    assert isinstance(worker.grammars, Grammars)
    matcher = worker.grammars.matcher(compiled[0])
    assert matcher.consume_tokens(unpacked(response.token_ids))


async def test_a_step_compiles_a_grammar_that_was_not_prepared(
    stub: worker_pb2_grpc.WorkerStub, compiled: list[StructuredOutputs]
) -> None:
    prepared = worker_pb2.PrepareGrammarRequest(structured_outputs=YES_OR_NO)
    response = await run(stub)
    assert len(compiled) == 1
    await stub.PrepareGrammar(prepared, timeout=30)
    assert len(compiled) == 1
    assert (await run(stub)).token_ids == response.token_ids


async def test_a_grammar_that_does_not_compile_is_an_invalid_argument(
    stub: worker_pb2_grpc.WorkerStub,
) -> None:
    for wrong, why in ((WRONG, "unclosed group"), (common_pb2.StructuredOutputs(), "kind")):
        request = worker_pb2.PrepareGrammarRequest(structured_outputs=wrong)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.PrepareGrammar(request, timeout=30)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert why in (refused.value.details() or "")


@pytest.mark.parametrize(
    ("sampling", "errors"),
    [({"structured_outputs": WRONG}, ["unclosed group"]), ({"allowed_token_ids": [PROMPT[0]]}, [])],
)
async def test_only_the_request_without_an_allowed_token_is_refused(
    sampling: dict[str, object], errors: list[str], stub: worker_pb2_grpc.WorkerStub
) -> None:
    response = await run(stub, **sampling)
    assert unpacked(response.refused_requests) == [0]
    assert unpacked(response.refused_tokens) == [0]
    assert unpacked(response.nan_requests) == []
    assert [error.index for error in response.grammar_errors] == [0] * len(errors)
    for error, why in zip(response.grammar_errors, errors, strict=True):
        assert why in error.message
