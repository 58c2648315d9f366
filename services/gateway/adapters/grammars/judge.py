"""Compiles the grammars of requests at the gateway, to refuse grammars that cannot be compiled."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.recent import Recent
from services.common.request.structured_outputs import FIELD, StructuredOutputs, invalid

if TYPE_CHECKING:
    from services.common.request.grammar_compiler import GrammarCompiler

MAX_COMPILE_SECONDS = 2.0
"""Limit on the processor time of one compilation, in seconds. Workers compile the grammar again,
without a limit. With a limit, a worker could refuse a grammar that the gateway has accepted, since
measured times vary.
"""
_MAX_WAITING = 64
_MAX_KEPT = 256

_Vocabulary = tuple[int, tuple[int, ...]]


class GrammarJudge:
    """Implements the core's Grammars. A single thread compiles, so that the event loop is not
    blocked, and a hostile grammar uses at most one core. Verdicts are cached.
    """

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """`tokenizer_json` returns the text of a tokenizer.json."""
        self._tokenizer_json = tokenizer_json
        self._compiler: tuple[_Vocabulary, GrammarCompiler] | None = None
        self._verdicts: Recent[tuple[StructuredOutputs, _Vocabulary], str] = Recent(_MAX_KEPT)
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def check(
        self, wanted: StructuredOutputs, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        vocabulary = (vocab_size, tuple(eos_token_ids))
        verdict = self._verdicts.get((wanted, vocabulary))
        if verdict is None:
            verdict = await self._new_verdict(wanted, vocabulary)
        self._verdicts[wanted, vocabulary] = verdict
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    async def _new_verdict(self, wanted: StructuredOutputs, vocabulary: _Vocabulary) -> str:
        """Runs `_judge` in the thread. Raises ResourceExhausted if too many calls wait for it."""
        if self._num_waiting >= _MAX_WAITING:
            raise ResourceExhausted(
                f"{FIELD}: {self._num_waiting} grammars already wait to be compiled; try again "
                "later",
                retry_after_seconds=1.0,
            )
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._judge, wanted, vocabulary)
        finally:
            self._num_waiting -= 1

    def _judge(self, wanted: StructuredOutputs, vocabulary: _Vocabulary) -> str:
        """Returns why a grammar cannot be compiled. The result is empty if it can be compiled. Runs
        in the thread.
        """
        try:
            compiler = self._compiler_of(vocabulary)
            began = time.thread_time()
            compiler.compile(wanted)
            if time.thread_time() - began > MAX_COMPILE_SECONDS:
                raise invalid(f"{wanted.kind.value}: takes too long to compile")
        except InvalidArgument as error:
            return error.message
        return ""

    def _compiler_of(self, vocabulary: _Vocabulary) -> "GrammarCompiler":
        if self._compiler is None or self._compiler[0] != vocabulary:
            # Imported here, since most gateways compile no grammar.
            from services.common.request.grammar_compiler import GrammarCompiler  # noqa: PLC0415

            try:
                compiler = GrammarCompiler(self._tokenizer_json(), *vocabulary)
            except ValueError as error:
                reason = f"not available with this model's tokenizer: {error}"
                raise invalid(reason) from error
            self._compiler = vocabulary, compiler
        return self._compiler[1]
