"""Compiles the grammars of requests at the gateway, to refuse grammars that cannot be compiled."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.recent import Recent
from services.common.request.structured_outputs import FIELD, StructuredOutputs, invalid
from services.gateway.adapters.grammars import compiler_process

MAX_COMPILE_SECONDS = 2.0
"""Limit on the processor time of one compilation, in seconds. Workers compile the grammar again,
without a limit. With a limit, a worker could refuse a grammar that the gateway has accepted, since
measured times vary.
"""
_MAX_WAITING = 64
_MAX_KEPT = 256

_Vocabulary = tuple[int, tuple[int, ...]]
_Case = tuple[StructuredOutputs, _Vocabulary]


@dataclass(eq=False)
class _Pending:
    """A verdict for which `num_calls` calls wait."""

    verdict: asyncio.Future[str]
    num_calls: int = 0


class GrammarJudge:
    """Implements the core's Grammars. A process compiles, so that neither the event loop nor the
    gateway's memory depends on a hostile grammar, which uses at most one core. A thread waits for
    the process. Verdicts are cached.
    """

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """`tokenizer_json` returns the text of a tokenizer.json."""
        self._tokenizer_json = tokenizer_json
        self._compiler: tuple[_Vocabulary, compiler_process.CompilerProcess] | None = None
        self._verdicts: Recent[_Case, str] = Recent(_MAX_KEPT)
        self._pending: dict[_Case, _Pending] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def check(
        self, wanted: StructuredOutputs, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        case = (wanted, (vocab_size, tuple(eos_token_ids)))
        verdict = self._verdicts.get(case)
        if verdict is None:
            verdict = await self._new_verdict(case)
        self._verdicts[case] = verdict
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    async def _new_verdict(self, case: _Case) -> str:
        """Runs `_judge` in the thread, once for all calls that wait for the same grammar, and not
        if they are all cancelled before. Raises ResourceExhausted if too many grammars wait.
        """
        pending = self._pending.get(case)
        if pending is None:
            if len(self._pending) >= _MAX_WAITING:
                raise ResourceExhausted(
                    f"{FIELD}: {len(self._pending)} grammars already wait to be compiled; try "
                    "again later",
                    retry_after_seconds=1.0,
                )
            loop = asyncio.get_running_loop()
            pending = _Pending(loop.run_in_executor(self._thread, self._judge, *case))
            self._pending[case] = pending
        pending.num_calls += 1
        try:
            return await asyncio.shield(pending.verdict)
        finally:
            pending.num_calls -= 1
            if not pending.num_calls:
                pending.verdict.cancel()
                del self._pending[case]

    def _judge(self, wanted: StructuredOutputs, vocabulary: _Vocabulary) -> str:
        """Returns why a grammar cannot be compiled. The result is empty if it can be compiled. Runs
        in the thread.
        """
        try:
            reason, seconds = self._compiler_of(vocabulary).judge(wanted)
        except InvalidArgument as error:
            return error.message
        except compiler_process.CompilerEnded:
            reason, seconds = "", inf
        if reason or seconds <= MAX_COMPILE_SECONDS:
            return reason
        return invalid(f"{wanted.kind.value}: takes too long to compile").message

    def _compiler_of(self, vocabulary: _Vocabulary) -> compiler_process.CompilerProcess:
        if self._compiler is not None:
            known, compiler = self._compiler
            if known == vocabulary and not compiler.has_ended:
                return compiler
        try:
            compiler = compiler_process.CompilerProcess(self._tokenizer_json(), *vocabulary)
        except ValueError as error:
            reason = f"not available with this model's tokenizer: {error}"
            raise invalid(reason) from error
        self._compiler = vocabulary, compiler
        return compiler
