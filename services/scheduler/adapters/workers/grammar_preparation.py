"""What workers prepare for requests that arrive, while these wait and others overtake: they compile
grammars and load adapters.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from services.common.errors import InvalidArgument, StepwellError
from services.common.request.adapter import Adapter
from services.common.request.finish_reason import FinishReason
from services.common.request.structured_outputs import StructuredOutputs
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.request import Request

logger = logging.getLogger(__name__)


class GrammarWorkers(Protocol):
    """All workers of a replica."""

    def has_grammar(self, wanted: StructuredOutputs) -> bool:
        """Whether every worker has compiled it, as far as is known."""

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        """Lets every worker compile it. Raises StepwellError: InvalidArgument if that cannot be
        done.
        """


class GrammarPreparation:
    """Lets workers compile the grammars of requests and load their adapters, and says when each is
    there.
    """

    def __init__(
        self,
        workers: GrammarWorkers,
        adapters: AdapterLoader,
        compiled: Callable[[Request, str, FinishReason], None],
    ) -> None:
        """`compiled` is called with a request and why something cannot be prepared, or "", and how
        the request ends for that: what a worker refuses to compile is the client's error, as it is
        where the edge refuses it.
        """
        self._adapters = adapters
        self._workers = workers
        self._compiled = compiled
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, request: Request, adapter: Adapter | None = None) -> None:
        """Lets a request that is about to be queued wait for its grammar, if it has one, and for
        its adapter, unless the workers have them.
        """
        wanted = request.sampling.structured_outputs
        if adapter is not None and self._adapters.is_loaded(adapter.digest):
            adapter = None
        if wanted is None and adapter is None:
            return
        if adapter is None and wanted is not None and self._workers.has_grammar(wanted):
            request.grammar = GrammarStatus.READY
            return
        request.grammar, request.awaits_adapter = GrammarStatus.COMPILING, adapter is not None
        self._spawn(self._prepare(request, wanted, adapter))

    def begin_turn(self, chunk: InputChunk) -> None:
        """Lets workers compile the grammar of a session's next turn, which does not wait for it."""
        wanted = chunk.sampling.structured_outputs
        if wanted is not None and not self._workers.has_grammar(wanted):
            self._spawn(self._error(wanted))

    async def _prepare(
        self, request: Request, wanted: StructuredOutputs | None, adapter: Adapter | None
    ) -> None:
        error, reason = "", FinishReason.ERROR
        if adapter is not None:
            error = await self._adapters.load_for(request, adapter)
        if wanted is not None and not error:
            error, reason = await self._error(wanted), FinishReason.GRAMMAR_ERROR
        self._compiled(request, error, reason)

    async def _error(self, wanted: StructuredOutputs) -> str:
        """Why a grammar cannot be compiled; empty once it is, or will be when its request runs: by
        a worker that is away or takes long.
        """
        try:
            await self._workers.prepare_grammar(wanted)
        except InvalidArgument as refusal:
            return refusal.message
        except StepwellError as failure:
            logger.info("a grammar is compiled when its request runs: %s", failure.message)
        return ""

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name="prepare grammar")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
