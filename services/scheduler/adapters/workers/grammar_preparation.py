"""Makes the workers compile the grammars and load the adapters that waiting requests need."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.errors import InvalidArgument, StepwellError
from services.common.recent import Recent
from services.common.request.adapter import Adapter
from services.common.request.finish import FinishReason
from services.common.request.structured_outputs import KEPT_GRAMMARS, StructuredOutputs
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.request import Request

MAX_KNOWN = KEPT_GRAMMARS // 2
"""Limit on the number of grammars that are known to be compiled. Workers keep twice as many
grammars, because they may use them in another order than this class. A worker that has still
dropped a grammar compiles it again when the request runs.
"""


class PreparedGrammars:
    """The most recently used grammars that all workers have compiled."""

    def __init__(self) -> None:
        self._known: Recent[StructuredOutputs, None] = Recent(MAX_KNOWN)

    def has(self, wanted: StructuredOutputs) -> bool:
        """Whether the workers have compiled a grammar. The call counts as a use of the grammar."""
        if wanted in self._known:
            self._known.move_to_end(wanted)
            return True
        return False

    def add(self, wanted: StructuredOutputs) -> None:
        self._known[wanted] = None

    def forget(self) -> None:
        """Removes all grammars, because a worker is a new process."""
        self._known.clear()


logger = logging.getLogger(__name__)


class GrammarWorkers(Protocol):
    def has_grammar(self, wanted: StructuredOutputs) -> bool:
        """Whether every worker is known to have compiled a grammar."""

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        """Makes every worker compile a grammar. Raises InvalidArgument if they refuse the grammar,
        and another StepwellError if a worker fails.
        """


@dataclass(eq=False)
class GrammarPreparation:
    """Prepares requests on the workers, and calls `compiled` when a request is prepared."""

    workers: GrammarWorkers
    adapters: AdapterLoader
    compiled: Callable[[Request, str, FinishReason], None]
    """Called with a prepared request, an error (or an empty string), and the finish reason of the
    error, which is a client error if the workers refuse the grammar.
    """
    _tasks: set[asyncio.Task[object]] = field(init=False, default_factory=set)

    def begin(self, request: Request, adapter: Adapter | None = None) -> None:
        """Begins to prepare a request, which waits if its grammar or adapter is missing."""
        wanted = request.sampling.structured_outputs
        if adapter is not None and self.adapters.is_loaded(adapter.digest):
            adapter = None
        if wanted is None and adapter is None:
            return
        if adapter is None and wanted is not None and self.workers.has_grammar(wanted):
            request.grammar = GrammarStatus.READY
            return
        request.grammar, request.awaits_adapter = GrammarStatus.COMPILING, adapter is not None
        self._spawn(self._prepare(request, wanted, adapter))

    def begin_turn(self, chunk: InputChunk) -> None:
        """Makes the workers compile the next turn's grammar. The turn does not wait for this."""
        wanted = chunk.sampling.structured_outputs
        if wanted is not None and not self.workers.has_grammar(wanted):
            self._spawn(self._error(wanted))

    async def _prepare(
        self, request: Request, wanted: StructuredOutputs | None, adapter: Adapter | None
    ) -> None:
        error, reason = "", FinishReason.ERROR
        if adapter is not None:
            error = await self.adapters.load_for(request, adapter)
        if wanted is not None and not error:
            error, reason = await self._error(wanted), FinishReason.GRAMMAR_ERROR
        self.compiled(request, error, reason)

    async def _error(self, wanted: StructuredOutputs) -> str:
        """Makes the workers compile a grammar. Returns an error if they refuse it, otherwise an
        empty string. If a worker was lost or slow, workers compile the grammar when the request
        runs.
        """
        try:
            await self.workers.prepare_grammar(wanted)
        except InvalidArgument as refusal:
            return refusal.message
        except StepwellError as failure:
            logger.info(
                "a grammar could not be compiled in advance, and is compiled when its request "
                "runs: %s",
                failure.message,
            )
        return ""

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name="prepare grammar")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
