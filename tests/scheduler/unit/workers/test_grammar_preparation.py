"""A request waits until the workers have compiled its grammar, and no longer."""

import asyncio
from collections.abc import Sequence

import pytest

from services.common.errors import InvalidArgument, StepwellError, Unavailable
from services.common.pool.ids import RequestKey
from services.common.request.adapter import Adapter
from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.adapters.workers.grammar_preparation import GrammarPreparation
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.request import Request

WANTED = StructuredOutputs(StructuredOutputsKind.REGEX, "a+")


class Workers:
    """Workers whose compilations end when the test completes `done`."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutputs] = []
        self.had: set[StructuredOutputs] = set()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_grammar(self, wanted: StructuredOutputs) -> bool:
        return wanted in self.had

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        self.asked.append(wanted)
        await self.done

    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        raise AssertionError(f"no request has {adapter.name}, beside {len(kept)} others")


class Preparing:
    def __init__(self) -> None:
        self.workers = Workers()
        self.compiled: asyncio.Queue[tuple[Request, str]] = asyncio.Queue()
        compiled = self.compiled

        def note(request: Request, error: str, reason: FinishReason) -> None:
            assert reason is FinishReason.GRAMMAR_ERROR
            compiled.put_nowait((request, error))

        adapters = AdapterLoader(self.workers, 2, lambda: (), lambda *_: None)
        self.preparation = GrammarPreparation(self.workers, adapters, note)

    def begin(self, wanted: StructuredOutputs | None) -> Request:
        sampling = SamplingParams(structured_outputs=wanted)
        request = Request("a", RequestKey(1), [1, 2], 2, sampling)
        self.preparation.begin(request)
        return request


async def test_a_request_without_a_grammar_waits_for_nothing() -> None:
    preparing = Preparing()
    assert preparing.begin(None).grammar is None
    await asyncio.sleep(0)
    assert preparing.workers.asked == []


async def test_what_the_workers_have_is_waited_for_by_no_request() -> None:
    preparing = Preparing()
    preparing.workers.had.add(WANTED)
    assert preparing.begin(WANTED).grammar is GrammarStatus.READY
    preparing.preparation.begin_turn(InputChunk([3], SamplingParams(structured_outputs=WANTED)))
    await asyncio.sleep(0)
    assert preparing.workers.asked == []
    assert preparing.compiled.empty()


async def test_the_next_turn_of_a_session_is_compiled_ahead_of_it() -> None:
    preparing = Preparing()
    preparing.preparation.begin_turn(InputChunk([3], SamplingParams()))
    preparing.preparation.begin_turn(InputChunk([3], SamplingParams(structured_outputs=WANTED)))
    await asyncio.sleep(0)
    assert preparing.workers.asked == [WANTED]
    assert preparing.compiled.empty()


async def test_a_request_waits_until_the_workers_are_done() -> None:
    preparing = Preparing()
    request = preparing.begin(WANTED)
    assert request.grammar is GrammarStatus.COMPILING
    await asyncio.sleep(0)
    assert preparing.workers.asked == [WANTED]
    assert preparing.compiled.empty()
    preparing.workers.done.set_result(None)
    assert await preparing.compiled.get() == (request, "")


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (InvalidArgument("no such rule"), "no such rule"),
        # The request runs in spite of the failure. The worker compiles the grammar in the step.
        (Unavailable("the worker is away"), ""),
    ],
)
async def test_only_a_wrong_grammar_ends_its_request(failure: StepwellError, error: str) -> None:
    preparing = Preparing()
    request = preparing.begin(WANTED)
    preparing.workers.done.set_exception(failure)
    assert await preparing.compiled.get() == (request, error)
