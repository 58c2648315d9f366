"""Compiles grammars in a process of its own, whose processor time and memory the kernel limits.

llguidance limits most of its work, but not all: a short grammar can take minutes and gigabytes, for
example a JSON Schema with several alternatives for the divisors of a number. A thread that compiles
cannot be stopped. A process can.
"""

import json
import math
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from threading import Timer

from services.common.errors import InvalidArgument, Unavailable
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind

_MOST_SECONDS = 2
"""Limit on the processor time of one compilation, which is rounded up to a time of the process in
whole seconds. The kernel ends a process that exceeds it.
"""
_MOST_BYTES = 2**32
"""Limit on the address space of the process."""
_MOST_WAIT_SECONDS = 60.0
"""Limit on the time of one compilation on a busy machine. A process that exceeds it is killed."""


class CompilerEnded(Exception):
    """The process has ended, because the grammar takes too much time or memory."""


class CompilerProcess:
    """A process that compiles grammars for one vocabulary, one after the other. It ends with this
    object.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Has the arguments of GrammarCompiler. Raises ValueError as GrammarCompiler does, and
        Unavailable if the process cannot start.
        """
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal does not reach the process
            )
        except OSError as error:
            raise _unavailable() from error
        self._end = weakref.finalize(self, _end, self._process)
        try:
            reason, _ = self._ask([tokenizer_json, vocab_size, list(eos_token_ids)])
        except CompilerEnded as ended:
            raise _unavailable() from ended
        if reason:
            raise ValueError(reason)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def judge(self, wanted: StructuredOutputs) -> tuple[str, float]:
        """Returns why a grammar cannot be compiled, empty if it can be compiled, and the seconds of
        processor time of the compilation. Raises CompilerEnded, and Unavailable if the process was
        killed for another reason than its limits.
        """
        try:
            return self._ask([wanted.kind.value, wanted.text])
        except CompilerEnded as ended:
            if self._process.returncode == -signal.SIGKILL:
                raise _unavailable() from ended
            raise

    def _ask(self, question: object) -> tuple[str, float]:
        """Sends a line, and waits for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = Timer(_MOST_WAIT_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            reason, seconds = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:  # a broken pipe, or no answer
            self._end()
            raise CompilerEnded from error
        finally:
            timer.cancel()
        return reason, seconds


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _unavailable() -> Unavailable:
    return Unavailable(
        "the process that compiles grammars has ended; try again", retry_after_seconds=1.0
    )


def main() -> None:
    """Answers the lines of standard input: first the arguments of GrammarCompiler, then grammars.
    An answer is the reason why a grammar is refused, and the time of its compilation.
    """
    # Imported here, since the gateway imports this module.
    from services.common.request.grammar_compiler import GrammarCompiler  # noqa: PLC0415

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _MOST_BYTES)
    questions = map(json.loads, sys.stdin.buffer)
    try:
        compiler = GrammarCompiler(*next(questions))
    except ValueError as error:
        _answer(str(error), 0.0)
        return
    _answer("", 0.0)
    for kind, text in questions:
        began = time.process_time()
        _limit(resource.RLIMIT_CPU, math.ceil(began) + _MOST_SECONDS)
        try:
            compiler.compile(StructuredOutputs(StructuredOutputsKind(kind), text))
            reason = ""
        except InvalidArgument as error:
            reason = error.message
        _answer(reason, time.process_time() - began)


def _limit(what: int, most: int) -> None:
    _, highest = resource.getrlimit(what)
    if highest != resource.RLIM_INFINITY:
        most = min(most, highest)
    resource.setrlimit(what, (most, highest))


def _answer(reason: str, seconds: float) -> None:
    print(json.dumps([reason, seconds]), flush=True)


if __name__ == "__main__":
    main()
