"""Grammars of requests that arrive: the workers compile them while the requests wait, and others
overtake.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from services.common.errors import InvalidArgument, StepwellError
from services.common.structured_outputs import StructuredOutputs
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.request import InputChunk, Request

logger = logging.getLogger(__name__)


class GrammarWorkers(Protocol):
    """All workers of a replica."""

    async def prepare_grammar(self, wanted: StructuredOutputs) -> None:
        """Lets every worker compile it. Raises StepwellError: InvalidArgument if that cannot be
        done.
        """


class GrammarPreparation:
    """Lets workers compile the grammars of requests, and says when each is there."""

    def __init__(self, workers: GrammarWorkers, compiled: Callable[[Request, str], None]) -> None:
        """`compiled` is called with a request and why its grammar cannot be compiled, or ""."""
        self._workers = workers
        self._compiled = compiled
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, request: Request) -> None:
        """Lets a request that is about to be queued wait for its grammar, if it has one."""
        wanted = request.sampling.structured_outputs
        if wanted is None:
            return
        request.grammar = GrammarStatus.COMPILING
        self._spawn(self._compile(request, wanted))

    def begin_turn(self, chunk: InputChunk) -> None:
        """Lets workers compile the grammar of a session's next turn, which does not wait for it."""
        if (wanted := chunk.sampling.structured_outputs) is not None:
            self._spawn(self._error(wanted))

    async def _compile(self, request: Request, wanted: StructuredOutputs) -> None:
        self._compiled(request, await self._error(wanted))

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
