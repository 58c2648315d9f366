"""A load of agents' programs, from a workload of `services.simulation.laboratory`."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from services.cli.bench.core.session import Message, Session, Turn
from services.cli.bench.core.vocabulary import Vocabulary
from services.simulation.laboratory import programs


@dataclass(eq=False)
class ProgramLoad:
    """Yields each program as a session, whose think times are the run times of tools. Programs of
    an application begin with equal text. If `says_names` is set, each request has the id of its
    program. The last request of a program also has a flag, and any other request the name of the
    tool that runs after it.
    """

    items: Iterable[programs.Program]
    vocabulary: Vocabulary
    seed: int
    says_names: bool

    def __iter__(self) -> Iterator[Session]:
        for program in self.items:
            yield Session(program.number, list(self._turns(program)), program.arrival_seconds)

    def _turns(self, program: programs.Program) -> Iterator[Turn]:
        draw = random.Random(f"{self.seed}/program/{program.number}")
        for index, turn in enumerate(program.turns):
            messages: tuple[Message, ...] = (
                Message("user", self.vocabulary.text(draw, turn.num_new_tokens)),
            )
            if index == 0 and program.num_shared_tokens:
                shared = random.Random(f"{self.seed}/application/{program.application}")
                text = self.vocabulary.text(shared, program.num_shared_tokens)
                messages = (Message("system", text), *messages)
            yield Turn(
                messages,
                turn.num_output_tokens,
                turn.pause_seconds if index else 0.0,
                self._names(program, index) if self.says_names else {},
            )

    def _names(self, program: programs.Program, index: int) -> dict[str, Any]:
        name = {"job_id": f"{self.seed}/{program.number}"}
        if index + 1 == len(program.turns):
            return name | {"is_last_step": True}
        return name | {"this_func_call": program.turns[index + 1].tool}
