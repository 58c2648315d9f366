"""Pins: ended requests that keep their blocks for the next turn of their program. A program is the
requests (turns) of one run of an agent. Between two turns, in a pause, a tool runs. A context is
the blocks that an ended turn has left in the pool.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from services.common.pool.ids import ContextId, RequestKey
from services.common.request.finish import FinishReason
from services.scheduler.core.policies.continuum.pin_times import Pauses
from services.scheduler.core.policies.observer import ProgramObserver, Recomputations
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.programs import Context, KnownPrograms, Program
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.program_turn import PausedProgram, ProgramTurn
from services.scheduler.core.request import Request, RequestStatus

UNDECIDED_SECONDS = 0.5
"""Limit on the time for which the blocks of a turn are kept while the tool after it is unknown. A
gateway reports the tool shortly after the turn's end, or no tool if the answer calls none.
"""
_WHOLE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class PinTimes(Protocol):
    """Decides how long ended turns are pinned."""

    pauses: Pauses

    def seconds(self, tool: str, num_tokens: int) -> float:
        """Seconds for which a turn of `num_tokens` tokens is pinned while `tool` runs, or 0."""

    def waited(self, seconds: float) -> None:
        """Records how long a turn waited whose program was known but had no pin."""

    def program_ended(self, num_turns: int) -> None:
        """Records that a program has ended after `num_turns` turns."""


@dataclass(slots=True, eq=False)
class EndedTurn:
    context: Context
    key: RequestKey
    deadline: float
    """The time at which the turn's pin ends, if the turn is pinned."""


class Pins(Retention):
    """The pins and the programs of a replica.

    When a turn has ended, its blocks are kept until it is known which tool runs next, but at most
    for `UNDECIDED_SECONDS`. Then the turn is pinned for the time that `times` returns, counted from
    the turn's end. If this is 0, its blocks are freed. A new pin of a program ends the program's
    earlier pin. The end of a program ends all its pins. While a turn of a program waits, the
    program's pins do not end at their deadlines. A turn that was aborted or failed is not pinned.
    """

    def __init__(self, parts: PolicyParts, times: PinTimes, *, follows_paper: bool = False) -> None:
        """With `follows_paper`, a pin ends in the step after the admission of its program's next
        turn. If blocks are missing, one pin ends early: with `follows_paper`, the pin of the
        program that arrived last, otherwise the pin with the latest deadline.
        """
        self._config = parts.config
        self._clock = parts.clock
        self._release_blocks = parts.release
        self._times = times
        self._follows_paper = follows_paper
        self._known = KnownPrograms(parts.config)
        self._programs: dict[Request, Program] = {}
        """Maps waiting and running requests to their programs."""
        self._undecided: dict[ContextId, EndedTurn] = {}
        """Ended turns for which it is not known yet which tool runs next."""
        self._pinned: dict[RequestKey, EndedTurn] = {}
        self._pinned_of: dict[Program, list[EndedTurn]] = {}
        self._without_pin: dict[Request, float] = {}
        """Maps waiting requests of known programs without a pin to their arrival times."""
        self._first_deadline = math.inf
        self.version = 0
        """Increases when the order of waiting requests may have changed."""
        self.observer = ProgramObserver()
        self._recomputations = Recomputations(self._config.hash_block_size)

    # Attributes that determine the order of requests.

    def has_pin(self, request: Request) -> bool:
        return self._programs.get(request) in self._pinned_of

    def program_arrival(self, request: Request) -> float:
        """When the first turn of a request's program arrived. Infinity without a program."""
        program = self._programs.get(request)
        return math.inf if program is None else program.arrived

    # Called when requests arrive, are admitted, or end.

    def check(self, request: Request) -> None:
        self._known.check(request)

    def arrived(self, request: Request) -> None:
        now, config = self._clock(), self._config
        if config.pooling or not config.enable_prefix_caching:
            return
        request.hash_full_blocks(config.fingerprint, config.hash_block_size)
        program, context = self._known.find(request)
        if program is None:
            program = self._known.begin(request, None, now)
            self.observer.began(is_named=bool(request.program and request.program.id))
        elif program not in self._pinned_of:
            self._without_pin[request] = now
        if (forgotten := self._known.add(request, program)) is not None:
            self._end(forgotten)
        program.num_turns += 1
        request.program_turn = ProgramTurn(program.label, program.num_turns)
        if context is None and program.contexts and not program.num_running:
            context = list(program.contexts.values())[-1]
        if context is not None:
            if context.tool:
                self._times.pauses.add(context.tool, now - context.paused_at)
            context.describe(request, now)
            self.observer.returned(context.reason, now - context.paused_at)
            self._recomputations.returned(context.id, request)
            self._end_pause(context)
        program.num_running += 1
        self._programs[request] = program

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:  # noqa: ARG002
        now, arrived = self._clock(), self._without_pin.pop(request, None)
        if arrived is not None:
            self._times.waited(now - arrived)
        if self._follows_paper and request in self._programs:
            for turn in self._pinned_of.get(self._programs[request], ()):
                self._set_deadline(turn, now)

    def ended(self, request: Request) -> None:
        program, declared = self._programs.pop(request, None), request.program
        self._without_pin.pop(request, None)
        if program is None:
            return
        program.num_running -= 1
        program.last_active = now = self._clock()
        self._recomputations.ended(request, self.observer)
        if declared is not None and declared.ends:
            self._end(program)
        elif request.num_committed_blocks and request.known_to_pool and not program.has_ended:
            turn = self._pause(request, program, now)
            if request.finish_reason in _WHOLE:
                self._pinned[turn.key] = turn
                self._pinned_of.setdefault(program, []).append(turn)
                self._set_deadline(turn, turn.context.paused_at + UNDECIDED_SECONDS)
            if declared is not None and declared.tool:
                self.end_turn(turn.context.id, declared.tool, ends=False)
        else:
            self._known.rest(program)

    def end_turn(self, context: ContextId, tool: str, *, ends: bool) -> None:
        turn = self._undecided.pop(context, None)
        if turn is None:
            return
        turn.context.tool = tool
        if ends:
            self._end(turn.context.program)
        elif turn.key in self._pinned:
            seconds = self._times.seconds(tool, turn.context.num_tokens) if tool else 0.0
            if seconds > 0:
                self._release_all_of(turn.context.program, but=turn)
                self._set_deadline(turn, turn.context.paused_at + seconds)
            else:
                self._release(turn)

    def _pause(self, request: Request, program: Program, now: float) -> EndedTurn:
        """Begins the pause of a program after a turn with cached blocks."""
        size = self._config.hash_block_size
        context, same = self._known.pause(request, program, now, size)
        request.context = context.id
        context.num_blocks = request.num_committed_blocks * len(self._config.all_groups)
        turn = self._undecided[context.id] = EndedTurn(context, request.key, math.inf)
        if same is not None:
            self._end_pause(same)
            self._known.rest(same.program)
        for idle in self._known.idle(context.paused_at):
            if idle.program.num_running or len(idle.program.contexts) > 1:
                self._end_pause(idle)
            else:
                self._end(idle.program)
        for program_idle in self._known.idle_without_context(context.paused_at):
            self._end(program_idle)
        return turn

    def _end_pause(self, context: Context) -> None:
        self._known.end_pause(context)
        self._undecided.pop(context.id, None)

    def _end(self, program: Program) -> None:
        self._release_all_of(program)
        if not program.has_ended:
            self._times.program_ended(program.num_turns)
            self.observer.ended(program.last_active - program.arrived, program.num_turns)
            for context in self._known.end(program):
                self._undecided.pop(context.id, None)

    # Pins.

    @property
    def held(self) -> Collection[RequestKey]:
        return self._pinned.keys()

    def sweep(self) -> None:
        now = self._clock()
        if now < self._first_deadline:
            return
        waiting = self._waiting_programs()
        for turn in list(self._pinned.values()):
            if now >= turn.deadline and turn.context.program not in waiting:
                self._release(turn)
        deadlines = [turn.deadline for turn in self._pinned.values()]
        self._first_deadline = min(deadlines, default=math.inf)

    def _waiting_programs(self) -> set[Program]:
        return {
            program
            for request, program in self._programs.items()
            if request.status is not RequestStatus.RUNNING
        }

    def make_room(self) -> bool:
        if not self._pinned:
            return False
        turn = max(self._pinned.values(), key=self._priority_of_release)
        waits = turn.context.program in self._waiting_programs()
        self.observer.taken(turn.context.num_blocks, waits=waits)
        self._release(turn)
        return True

    def _priority_of_release(self, turn: EndedTurn) -> tuple[bool, float]:
        """The sort key by which `make_room` releases the turn with the largest key. Turns for which
        the next tool is unknown come first.
        """
        latest = turn.context.program.arrived if self._follows_paper else turn.deadline
        return turn.context.id in self._undecided, latest

    def release_all(self) -> None:
        for turn in list(self._pinned.values()):
            self._release(turn)

    def forget(self) -> None:
        """Records that the pool is empty. Programs and statistics are kept."""
        self._recomputations.lost(self._programs, self._known.last_context)
        self._pinned.clear()
        self._pinned_of.clear()
        self.version += 1

    def paused(self, most: int, now: float) -> list[PausedProgram]:
        turns = islice(reversed(self._pinned.values()), most)
        return [turn.context.paused_program(now) for turn in turns]

    @property
    def num_in_turn(self) -> int:
        """Number of programs with a turn that waits or runs."""
        return len(set(self._programs.values()))

    @property
    def num_paused(self) -> int:
        return self._known.num_paused

    @property
    def num_retained_blocks(self) -> int:
        # Metrics are collected in another thread. To copy the values is atomic.
        return sum(turn.context.num_blocks for turn in list(self._pinned.values()))

    def _set_deadline(self, turn: EndedTurn, deadline: float) -> None:
        turn.deadline = deadline
        self._first_deadline = min(self._first_deadline, deadline)
        self.version += 1

    def _release_all_of(self, program: Program, but: EndedTurn | None = None) -> None:
        for turn in list(self._pinned_of.get(program, ())):
            if turn is not but:
                self._release(turn)

    def _release(self, turn: EndedTurn) -> None:
        del self._pinned[turn.key]
        turns = self._pinned_of[turn.context.program]
        turns.remove(turn)
        if not turns:
            del self._pinned_of[turn.context.program]
        self._release_blocks(turn.key)
        self.version += 1
