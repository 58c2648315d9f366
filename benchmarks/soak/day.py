"""Lets a replica idle for a day of virtual time, while programs of agents are paused.

    python -m benchmarks.soak day [--hours 26] [--programs 50] [--blocks N] [--model DIR]

All services run in one process, on a simulated network, device and clock (see
`services.simulation`), so that a day takes minutes. Each program has a turn before the idle time
and one after it. The exit status is 1 if a second turn does not find the prompt of the first in the
prefix cache, if the number of Python objects has grown by more than 1 % after the first hour, or if
a service has logged a warning.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.arguments import add_model, count, make_parser, positive
from benchmarks.common.console import log

NUM_PROMPT_TOKENS = 20
"""The number of tokens of a program's first prompt, of which one block of 16 is cached."""
NUM_TURN_TOKENS = 16
BLOCKS_PER_PROGRAM = 8
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 20.0, 30.0, 60.0
MAX_GROWTH = 0.01
"""The largest growth of the number of Python objects, as a fraction."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many programs found their contexts again, the number of Python objects after an hour (or
    half of the time, if that is less) and at the end, and the logged warnings.
    """

    num_programs: int
    num_continued: int
    num_objects: tuple[int, int]
    warnings: tuple[str, ...]

    @property
    def growth(self) -> float:
        first, last = self.num_objects
        return last / first - 1

    @property
    def is_good(self) -> bool:
        all_continued = self.num_continued == self.num_programs
        return all_continued and self.growth <= MAX_GROWTH and not self.warnings


def idle_day(model: Path, hours: float, num_programs: int, num_blocks: int) -> Outcome:
    """Runs the test. Raises RuntimeError if a request fails."""
    # Imported after the clocks are replaced, which the modules may store.
    from services.common.request.program import DeclaredProgram  # noqa: PLC0415
    from services.simulation.explore.answer import Answer  # noqa: PLC0415
    from services.simulation.explore.clients import ask  # noqa: PLC0415
    from services.simulation.explore.fleet import Fleet  # noqa: PLC0415
    from services.simulation.explore.members import Shape  # noqa: PLC0415
    from services.simulation.explore.requests import Edge, Request  # noqa: PLC0415
    from services.simulation.runtime.loop import VirtualLoop  # noqa: PLC0415
    from services.simulation.runtime.machine import outside, run_on  # noqa: PLC0415
    from services.simulation.runtime.network import Network  # noqa: PLC0415
    from services.simulation.runtime.process import Process  # noqa: PLC0415
    from services.simulation.runtime.streams import MemoryStreams  # noqa: PLC0415

    class Warned(Network):
        """A network whose log contains only the warnings and errors of the services."""

        def log(self, line: str) -> None:
            if " WARNING " in line or " ERROR " in line:
                super().log(line)

    network = Warned(VirtualLoop(0))
    MemoryStreams(network)
    settings = (("policy", "program"),)
    fleet = Fleet(network, model, Shape(num_blocks=num_blocks, has_redis=True, settings=settings))

    async def turn(program: int, number: int) -> int:
        """Runs one turn of a program. Returns the number of its cached prompt tokens."""
        num_tokens = NUM_PROMPT_TOKENS + (number - 1) * NUM_TURN_TOKENS
        prompt = [300 + (7919 * (program + 1) + i * i) % 3700 for i in range(num_tokens)]
        declared = DeclaredProgram(f"idle-{program}")
        request = Request(Edge.GRPC, tuple(prompt), max_tokens=4, program=declared)
        answer, client = Answer(), Process(network.loop, "client")
        async with asyncio.timeout(ANSWER_SECONDS):
            await client.spawn(ask("gateway-0", request, answer))
        if answer.error is not None:
            raise RuntimeError(f"turn {number} of program {program}: {answer.error}")
        return answer.num_cached_tokens

    async def main() -> Outcome:
        fleet.start_all()
        async with asyncio.timeout(START_SECONDS):
            await fleet.until_ready()
        for program in range(num_programs):
            await turn(program, 1)
        first_hours = min(1.0, hours / 2)
        await asyncio.sleep(3600 * first_hours)
        begun = _num_objects()
        passed = first_hours
        while passed < hours:
            more = min(1.0, hours - passed)
            await asyncio.sleep(3600 * more)
            passed += more
            with outside():
                log(f"{passed:.1f} of {hours:.1f} hours")
        objects = begun, _num_objects()
        cached = [await turn(program, 2) for program in range(num_programs)]
        num_continued = sum(number >= 16 for number in cached)
        warnings = tuple(network.lines)
        await fleet.stop_all(STOP_SECONDS)
        return Outcome(num_programs, num_continued, objects, warnings)

    return run_on(network, 0, main)


def _num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def report(outcome: Outcome) -> str:
    return "\n".join(
        (
            f"{outcome.num_continued} of {outcome.num_programs} programs found their contexts; "
            f"{outcome.num_objects[1]} Python objects, {outcome.growth:+.2%} after the first hour; "
            f"{len(outcome.warnings)} warnings",
            *outcome.warnings,
        )
    )


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    parser = make_parser("soak day", __doc__)
    add = parser.add_argument
    add("--hours", type=positive, default=26.0, help="virtual hours without requests (default: 26)")
    add("--programs", type=count, default=50, help="number of paused programs (default: 50)")
    add("--blocks", type=count, help=f"KV blocks (default: {BLOCKS_PER_PROGRAM} per program)")
    add_model(parser)
    options = parser.parse_args(argv)
    num_blocks = options.blocks or BLOCKS_PER_PROGRAM * options.programs
    from services.simulation.runtime.machine import install  # noqa: PLC0415

    install()
    outcome = idle_day(options.model, options.hours, options.programs, num_blocks)
    print(report(outcome))
    return 0 if outcome.is_good else 1
