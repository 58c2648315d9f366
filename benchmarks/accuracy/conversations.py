"""The programs (conversations) that both the real run and its simulation use.

They are a workload of `stepwell simulate`, with lengths and pauses scaled down for a small model
and a short run.
"""

from dataclasses import dataclass, replace
from itertools import count

from services.simulation.laboratory.programs import Context, Program, Turn
from services.simulation.laboratory.workloads import Traffic, generate

_ROUNDING = 64
"""The maximum number of tokens that rounding its scaled lengths may add to a conversation."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Generates conversations. `token_scale` and `pause_scale` are factors on the lengths and
    pauses of the workload. In chat the median prompt has 400 tokens and the median answer 200
    tokens before scaling, and the mean pause takes 38 s.
    """

    max_model_len: int
    token_scale: float = 0.25
    pause_scale: float = 0.05
    num_system_tokens: int = 64
    workload: str = "chat"

    def arriving(self, number: int, per_second: float, seed: int) -> list[Program]:
        """The first `number` conversations of a Poisson process with the rate `per_second`."""
        system = self.num_system_tokens if self.workload == "chat" else 0
        room = self.max_model_len - system - _ROUNDING
        traffic = Traffic(number, per_second, seed, max_tokens=int(room / self.token_scale))
        return list(map(self._scaled, generate(self.workload, traffic)))

    def _scaled(self, program: Program) -> Program:
        turns = tuple(
            replace(
                turn,
                num_new_tokens=self._tokens(turn.num_new_tokens),
                num_output_tokens=self._tokens(turn.num_output_tokens),
                pause_seconds=turn.pause_seconds * self.pause_scale,
            )
            for turn in program.turns
        )
        shared = self.num_system_tokens
        if self.workload != "chat":
            shared = round(program.num_shared_tokens * self.token_scale)
        return replace(program, turns=turns, num_shared_tokens=shared)

    def _tokens(self, number: int) -> int:
        return max(1, round(number * self.token_scale))


def at_once(programs: list[Program]) -> list[Program]:
    """The conversations, all arriving at the same time and without pauses."""
    return [
        replace(
            program,
            arrival_seconds=0.0,
            turns=tuple(replace(turn, pause_seconds=0.0) for turn in program.turns),
        )
        for program in programs
    ]


def with_priorities(programs: list[Program]) -> list[Program]:
    """The conversations with priorities, which are higher for fewer tokens."""
    return [replace(program, priority=sum(map(_num_tokens, program.turns))) for program in programs]


def _num_tokens(turn: Turn) -> int:
    return turn.num_new_tokens + turn.num_output_tokens


class RealContext:
    """The tokens of a real conversation so far. Prompts are those of the simulation, mapped to the
    vocabulary of the model, so that prompts have the same common prefixes. The answers are the
    model's own.
    """

    def __init__(self, program: Program, vocab_size: int) -> None:
        self._simulated = Context(program, program.number, program.num_shared_tokens)
        self._vocab_size = vocab_size
        self.token_ids: list[int] = []

    def prompt(self, turn: Turn) -> list[int]:
        """Appends the new tokens of the next turn, and returns the whole prompt."""
        context, known = self._simulated, len(self.token_ids)
        context.num_tokens = max(context.num_tokens, known) + turn.num_new_tokens
        self.token_ids += map(self._real, context.prompt()[known:], count(known))
        return list(self.token_ids)

    def _real(self, token: int, position: int) -> int:
        return ((token + position) * 2654435761 >> 12) % self._vocab_size
