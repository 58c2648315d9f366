"""Decides which contexts of paused programs stay cached.

A program is the requests (turns) of one run of an agent. Between two turns the program pauses. The
blocks that an ended turn leaves in the pool are a context. A waiting request is *warm* if at least
half of the context that it continues is cached, otherwise *cold*.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from services.common.pool.ids import ContextId
from services.common.pool.operations import (
    Admission,
    DropContexts,
    Operation,
    Outcome,
    RankContexts,
)
from services.scheduler.core.policies.observer import ProgramObserver, Recomputations
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.program.ended_programs import EndedPrograms, application_of
from services.scheduler.core.policies.program.order import DueTimes, Turns
from services.scheduler.core.policies.program.pauses import NEVER
from services.scheduler.core.policies.program.worth import Ranked, Worth
from services.scheduler.core.policies.programs import Context, KnownPrograms, Program
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.program_turn import PausedProgram, ProgramTurn
from services.scheduler.core.request import Request, RequestStatus


class ProgramRetention(Retention):
    """Tracks the programs of a replica, and decides which of their contexts stay cached."""

    def __init__(self, parts: PolicyParts) -> None:
        self._config = config = parts.config
        self._clock = parts.clock
        self._size = config.hash_block_size
        self._headroom = int(config.retention_headroom * (config.num_blocks - 1))
        self._contexts: dict[ContextId, Context] = {}
        """The contexts that stay cached, in the order in which their pauses began."""
        self._ended = EndedPrograms()
        self.worth = Worth(parts, self._contexts, self._ended)
        self._known = KnownPrograms(config)
        self._programs: dict[Request, Program] = {}
        """Maps waiting and running requests to their programs."""
        self._continued: dict[Request, Context] = {}
        """Maps waiting requests to the contexts that they continue."""
        self._dropped: list[ContextId] = []
        self._last_lost = ContextId(0)
        """The last context that was lost with the pool's blocks. Later contexts have larger ids."""
        self._num_other_blocks = config.num_blocks - 1
        """Number of free blocks that belong to no context."""
        self._sent: Ranked | None = None
        """The order of contexts that was last sent to the pool."""
        self._max_retained: dict[bytes, int] = {}
        """Maps tenants to limits on the blocks of their contexts. A missing tenant has no limit."""
        self.observer = ProgramObserver()
        self._recomputations = Recomputations(self._size)
        self.num_retained_blocks = 0
        """Number of free blocks that belong to contexts."""
        self.turns = Turns(config)
        self._due_times = DueTimes(self._ended)
        self.first_cold: Request | None = None
        """The cold request that must be admitted before all other requests, or None."""
        self.version = 0
        """Increases when the order of waiting requests may have changed."""

    # Called when requests arrive, are admitted, or end.

    def check(self, request: Request) -> None:
        self._known.check(request)

    def arrived(self, request: Request) -> None:
        """Assigns a new request to a known or new program."""
        now, config = self._clock(), self._config
        if config.pooling or not config.enable_prefix_caching:
            return
        request.hash_full_blocks(config.fingerprint, self._size)
        program, context = self._known.find(request)
        if program is None:
            application = application_of(request.block_hashes, self._size)
            program = self._known.begin(request, application, now)
            self.observer.began(is_named=bool(request.program and request.program.id))
        if (forgotten := self._known.add(request, program)) is not None:
            self._presume_ended(forgotten)
        if request.tenant_max_retained_share < 1 or request.tenant in self._max_retained:
            num_blocks = int(request.tenant_max_retained_share * (config.num_blocks - 1))
            self._max_retained[request.tenant] = num_blocks
        self._ended.returned(program)
        self._due_times.note_turn(continues=program.num_turns > 0)
        program.num_turns += 1
        request.program_turn = self._turn(program, context, now)
        if context is not None:
            self._return(context, request, now)
            self._continued[request] = context
        elif program.contexts and not program.num_running:
            self._supersede(program, request, now)
        if self.worth.is_held_up and not self._has_waiting:
            self.worth.nobody_waits()
        program.num_running += 1
        self._programs[request] = program
        self.version += 1

    @property
    def _has_waiting(self) -> bool:
        running = RequestStatus.RUNNING
        return any(request.status is not running for request in self._programs)

    def _turn(self, program: Program, context: Context | None, now: float) -> ProgramTurn:
        """Describes a turn, which `program.num_turns` already counts. If it continues no context,
        and other turns of the program wait or run, it begins a new conversation.
        """
        num_turns = program.num_turns
        if context is not None:
            return ProgramTurn(program.label, num_turns, context.num_turns, context.began, now)
        if program.num_running:
            return ProgramTurn(program.label, num_turns, 0, now, now)
        return ProgramTurn(program.label, num_turns, num_turns - 1, program.arrived, now)

    def _return(self, context: Context, request: Request, now: float) -> None:
        reason, seconds = context.reason, now - context.paused_at
        context.describe(request, now)
        self.worth.pauses.ended(context.program.tenant, reason, seconds)
        self.observer.returned(reason, seconds)
        context.returned_at = now
        self._recomputations.returned(context.id, request)
        self._known.end_pause(context)

    def _supersede(self, program: Program, request: Request, now: float) -> None:
        """Drops a program's contexts, because its next turn continues none of them: the client has
        shortened the conversation, or branched off.
        """
        *others, latest = program.contexts.values()
        self._return(latest, request, now)
        for context in (*others, latest):
            self._known.end_pause(context)
            self._drop(context)

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:
        """Counts an admission. Stops retaining the context that the request continues."""
        is_cold = request is self.first_cold or self.is_cold(request)
        self.first_cold = None
        self.turns.admitted(is_warm=not is_cold, cold_waits=any(map(self.is_cold, waiting)))
        context, waited = self._continued.pop(request, None), None
        if context is not None and context.id in self._contexts:
            assert context.returned_at is not None
            waited = self._clock() - context.returned_at
            self._drop(context)
        self.worth.admitted(waited)

    def ended(self, request: Request) -> ContextId | None:
        """Returns the context that the blocks of an ended request become. None if the request has
        no full block, or if its program has ended.
        """
        program = self._programs.pop(request, None)
        continued = self._continued.pop(request, None)
        if continued is not None and continued.id in self._contexts:
            self._drop(continued)
        if program is None:
            return None
        program.num_running -= 1
        program.last_active = now = self._clock()
        num_tokens = request.num_tokens - (request.num_cached_tokens or 0)
        program.num_tokens += num_tokens
        self._recomputations.ended(request, self.observer)
        loaded, turn = request.num_external_tokens, request.program_turn
        assert turn is not None
        self._due_times.turn_ended(now - turn.arrived, num_tokens)
        if loaded or turn.num_recomputed_tokens:
            self.worth.returned(loaded, turn.num_recomputed_tokens)
        declared = request.program
        if declared is not None and declared.ends:
            self._end(program)
        num_blocks = request.num_committed_blocks
        if not num_blocks or program.has_ended or not request.known_to_pool:
            self._known.rest(program)
            return None
        context, same = self._known.pause(request, program, now, self._size)
        context.tool = "" if declared is None else declared.tool
        if context.tool or context.keep_seconds:
            self._due_times.note_turn(continues=True)
        if self._config.only_grows:  # otherwise the pool reports how many blocks are left
            context.num_blocks = num_blocks * len(self._config.all_groups)
        self._contexts[context.id] = context
        if same is not None:
            self._ended.returned(same.program)
            self._known.rest(same.program)
            self._drop(same)
        self._forget_idle()
        request.context = context.id
        return context.id

    def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:
        """Records which tool runs after a turn, or that the turn was the program's last turn."""
        context = self._contexts.get(context_id)
        if context is None:
            return
        context.tool = tool
        if tool:
            self._due_times.note_turn(continues=True)
        if ends and context.returned_at is None:
            self._end(context.program)

    # Called for the transactions with the pool.

    def note(self, outcome: Outcome) -> None:
        """Records how many blocks each context still has, and how many other blocks are free."""
        self.num_retained_blocks = outcome.num_retained_blocks
        self._num_other_blocks = outcome.num_free_blocks - outcome.num_retained_blocks
        for change in outcome.contexts:
            context = self._contexts.get(change.context)
            if context is None:
                if change.num_blocks:  # dropped before the pool had freed the request's blocks
                    self._dropped.append(change.context)
                continue
            if change.num_blocks != context.num_blocks and context.returned_at is not None:
                self.version += 1
            if change.num_blocks < context.num_blocks:
                num_taken = context.num_blocks - change.num_blocks
                self.observer.taken(num_taken, waits=context.returned_at is not None)
            if not (change.num_blocks and context.num_blocks):
                self.worth.changed()
            context.num_blocks, context.num_own_blocks = change.num_blocks, change.num_own_blocks
        if self._max_retained and outcome.contexts:
            self._drop_above_limits()

    def _drop_above_limits(self) -> None:
        """Drops contexts of tenants that exceed their limits, the tenant's oldest context first."""
        num_retained = Counter[bytes]()
        for context in self._contexts.values():
            num_retained[context.program.tenant] += context.num_own_blocks
        for context in list(self._contexts.values()):
            tenant, most = context.program.tenant, self._max_retained.get(context.program.tenant)
            if most is not None and num_retained[tenant] > most and context.num_own_blocks:
                num_retained[tenant] -= context.num_own_blocks
                context.num_blocks = context.num_own_blocks = 0
                self._drop(context)

    def operations(self) -> list[Operation]:
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return [DropContexts(dropped)]

    def rank(self) -> list[Operation]:
        """Returns an operation with the order in which the pool may evict contexts, the least
        valuable first. Returns no operation if the pool needs no new order.
        """
        if not self._is_short:
            return []
        ranked = self.worth.ranked(self._clock())
        if ranked is self._sent:
            return []
        self._sent = ranked
        return [RankContexts([context.id for _, context in ranked])]

    def forget(self) -> None:
        """Records that the pool is empty. Programs and their pauses continue."""
        self.first_cold = None
        self._num_other_blocks = self._config.num_blocks - 1
        for context in self._contexts.values():
            context.num_blocks = context.num_own_blocks = 0
        self._last_lost = max(self._contexts, default=self._last_lost)
        self._recomputations.lost(self._programs, self._last_lost)
        self.worth.changed()
        self._dropped.clear()
        self.version += 1

    # Decisions about waiting requests.

    def is_warm(self, request: Request) -> bool:
        """Whether at least half of a request's context is cached. If KV-cache groups free blocks
        while a request runs (sliding windows, states), whether any block of the context is cached.
        """
        context = self._continued.get(request)
        return context is not None and 2 * self._num_cached(context) >= context.num_tokens

    def _num_cached(self, context: Context) -> float:
        """How many tokens of a context need not be computed again."""
        if not self._config.only_grows:
            return context.num_tokens if context.num_blocks else 0
        return context.num_blocks * self._size / len(self._config.all_groups)

    def is_cold(self, request: Request) -> bool:
        """Whether a request is not warm. A preempted request is never cold."""
        return not (request.num_preemptions or self.is_warm(request))

    def due(self, request: Request) -> tuple[float, float]:
        """When a request's conversation is due, and when it began (see `DueTimes`)."""
        program, turn = self._programs.get(request), request.program_turn
        if program is None or turn is None:
            return 0.0, 0.0
        context = self._continued.get(request)
        num_lost = 0.0
        if context is not None:
            num_lost = max(0.0, context.num_tokens - self._num_cached(context))
            num_lost *= 1.0 - self.worth.loaded_share
        return self._due_times.due(program, turn, num_lost), turn.began

    def limit(self, terms: Admission, request: Request, num_running: int) -> None:
        """Sets how many blocks an admission beside running requests must leave free, and how many
        blocks of contexts it may evict. There are no limits if programs have only one turn.
        """
        if not (num_running and self._due_times.have_later_turns):
            return
        if self.is_cold(request):
            terms.num_blocks_kept_free = max(terms.num_blocks_kept_free, self._headroom)
        if self._contexts and request is not self.first_cold:
            terms.num_retained_blocks = 0
            if self._is_short:
                terms.num_retained_blocks = self.worth.num_blocks(num_running, self._clock())

    def held_up(self, num_running: int) -> str:
        return self.worth.held_up(num_running, self._clock())

    @property
    def _is_short(self) -> bool:
        """Whether the next steps may need blocks of contexts, or a request waits for them."""
        if self.worth.is_held_up:
            return True
        config = self._config
        num_needed = 2 * config.token_budget // self._size + config.max_num_seqs
        return self._num_other_blocks < num_needed * len(config.all_groups) + self._headroom

    def _forget_idle(self) -> None:
        """Ends the programs whose pauses exceed `program_idle_seconds`. If there are too many
        contexts, also ends the programs that have paused for the longest time.
        """
        for context in self._known.idle(self._clock()):
            program = context.program
            if program.num_running or len(program.contexts) > 1:
                self._known.end_pause(context)
                self._drop(context)
            else:
                self._presume_ended(program)
        for program in self._known.idle_without_context(self._clock()):
            self._end(program)

    def paused(self, most: int, now: float) -> list[PausedProgram]:
        latest = reversed(self._contexts.values())
        contexts = (one for one in latest if one.num_blocks and one.returned_at is None)
        return [one.paused_program(now) for one in islice(contexts, most)]

    @property
    def num_in_turn(self) -> int:
        """Number of programs with a turn that waits or runs."""
        return len(set(self._programs.values()))

    @property
    def num_paused(self) -> int:
        return self._known.num_paused

    def _presume_ended(self, program: Program) -> None:
        for context in program.contexts.values():
            self.worth.pauses.ended(program.tenant, context.reason, NEVER)
        self._end(program)

    def _end(self, program: Program) -> None:
        if program.has_ended:
            return
        self._ended.add(program)
        self.observer.ended(program.last_active - program.arrived, program.num_turns)
        for context in self._known.end(program):
            self._drop(context)

    def _drop(self, context: Context) -> None:
        if self._contexts.pop(context.id, None) is None:
            return
        self.worth.changed()
        if context.id > self._last_lost:
            self._dropped.append(context.id)
