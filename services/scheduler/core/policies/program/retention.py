"""Decides which paused contexts are worth their blocks."""

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
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.program.ended_programs import EndedPrograms, application_of
from services.scheduler.core.policies.program.observer import ProgramObserver
from services.scheduler.core.policies.program.pauses import NEVER, PauseStatistics
from services.scheduler.core.policies.programs import Context, KnownPrograms, Program
from services.scheduler.core.policies.retention import NoRetention
from services.scheduler.core.program_turn import PausedProgram, ProgramTurn
from services.scheduler.core.request import Request

HEADROOM = 0.1
"""The fraction of the pool that a request without its context leaves free, beside running ones and
contexts that it may not take.
"""
AGING_INTERVAL = 8
"""Of so many admissions of requests without their contexts, one is of the longest waiting."""
MAX_WARM_ADMISSIONS = 32
"""Admissions of requests with their contexts, while one without waits, after which it comes first.
"""
_RANK_SECONDS = 0.01
"""The time for which an order of contexts is kept."""
_ONGOING_SECONDS = 2.0
"""The time between two looks at the pauses that have not ended."""
_WAIT_SMOOTHING = 0.1
_LEAST_WAIT = 0.05


class Turns:
    """Counts admissions, so that no request waits without a bound."""

    def __init__(self) -> None:
        self.num_cold = 0
        self.num_warm = 0

    def admitted(self, *, is_warm: bool, cold_waits: bool) -> None:
        if is_warm:
            self.num_warm += cold_waits
        else:
            self.num_cold, self.num_warm = self.num_cold + 1, 0

    @property
    def cold_comes_first(self) -> bool:
        """Whether a request without its context comes before all others."""
        return self.num_warm >= MAX_WARM_ADMISSIONS

    @property
    def oldest_comes_first(self) -> bool:
        """Whether the one that waits longest comes before others without their contexts."""
        return self.num_cold % AGING_INTERVAL == AGING_INTERVAL - 1


class ProgramRetention(NoRetention):
    """The paused contexts of a replica."""

    def __init__(self, parts: PolicyParts) -> None:
        self._config = config = parts.config
        self._clock = parts.clock
        self._costs = parts.step_costs
        self._size = config.hash_block_size
        self._headroom = int(HEADROOM * (config.num_blocks - 1))
        self._contexts: dict[ContextId, Context] = {}
        """In the order in which their pauses began."""
        self._known = KnownPrograms()
        self._programs: dict[Request, Program] = {}
        """The programs of waiting and running requests."""
        self._continued: dict[Request, Context] = {}
        """The contexts with which waiting requests begin."""
        self._dropped: list[ContextId] = []
        self._last_lost = ContextId(0)
        """The latest context that was in a pool that was lost. Later ones have greater numbers."""
        self._num_other_blocks = config.num_blocks - 1
        """Free blocks that are in no context."""
        self._ranked: list[tuple[float, Context]] | None = None
        """The result of `_by_value` at `_ranked_at`."""
        self._ranked_at = 0.0
        self._sent: list[tuple[float, Context]] | None = None
        """The order that the pool has."""
        self._pauses = PauseStatistics()
        self._noted_at = -_ONGOING_SECONDS
        """When the pauses that have not ended were last noted."""
        self._ended = EndedPrograms()
        self._mean_wait = 1.0
        self._credit = 0.0
        self._held_up_since: float | None = None
        self._why_held_up = ""
        self.observer = ProgramObserver()
        self.num_retained_blocks = 0
        """Free blocks that belong to contexts."""
        self.turns = Turns()
        self.first_cold: Request | None = None
        """The request without its context that comes before all others, if one does."""
        self.version = 0
        """Changes with all that the order of the queue depends on."""

    # What happens to requests.

    def arrived(self, request: Request) -> None:
        """A request was queued for the first time. Finds the program that it continues."""
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
        program.num_turns += 1
        request.program_turn = ProgramTurn(program.label, program.num_turns)
        if context is not None:
            self._return(context, request, now)
            self._continued[request] = context
        elif program.contexts and not program.num_running:
            self._supersede(program, request, now)
        program.num_running += 1
        self._programs[request] = program
        self.version += 1

    def _return(self, context: Context, request: Request, now: float) -> None:
        """The pause of a context ends, because the next turn has arrived."""
        reason, seconds = context.reason, now - context.paused_at
        context.describe(request, now)
        self._pauses.ended(context.program.tenant, reason, seconds)
        self.observer.returned(reason, seconds)
        context.returned_at = now
        self._known.end_pause(context)

    def _supersede(self, program: Program, request: Request, now: float) -> None:
        """A program goes on with another context, since it was shortened or branched."""
        *others, latest = program.contexts.values()
        self._return(latest, request, now)
        for context in (*others, latest):
            self._known.end_pause(context)
            self._drop(context)

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:
        """A request was admitted, one of those that wait. Its context is in use and needs no
        retention.
        """
        is_cold = request is self.first_cold or self.is_cold(request)
        self.first_cold = None
        self.turns.admitted(is_warm=not is_cold, cold_waits=any(map(self.is_cold, waiting)))
        self._credit, self._held_up_since = 0.0, None
        context = self._continued.pop(request, None)
        if context is not None and context.id in self._contexts:
            assert context.returned_at is not None
            waited = self._clock() - context.returned_at
            self._mean_wait += _WAIT_SMOOTHING * (waited - self._mean_wait)
            self._drop(context)

    def ended(self, request: Request) -> ContextId | None:
        """A request has ended. Returns the context that its blocks become. None if it has no full
        block, or its program has ended.
        """
        program = self._programs.pop(request, None)
        continued = self._continued.pop(request, None)
        if continued is not None and continued.id in self._contexts:
            self._drop(continued)
        if program is None:
            return None
        program.num_running -= 1
        program.last_active = now = self._clock()
        cached = request.num_cached_tokens or 0
        program.num_tokens += request.num_tokens - cached
        if (turn := request.program_turn) is not None and self._find_recomputed(turn, cached):
            self.observer.recomputed(turn.num_recomputed_tokens)
        declared = request.program
        if declared is not None and declared.ends:
            self._end(program)
        num_blocks = request.num_committed_blocks
        if not num_blocks or program.has_ended or not request.known_to_pool:
            return None
        context, same = self._known.pause(request, program, now, self._size)
        context.tool = "" if declared is None else declared.tool
        context.num_blocks = num_blocks * len(self._config.all_groups)
        self._contexts[context.id] = context
        if same is not None:
            self._drop(same)
        self._forget_idle()
        request.context = context.id
        return context.id

    def _find_recomputed(self, turn: ProgramTurn, num_cached_tokens: int) -> int:
        num_whole = turn.num_context_tokens // self._size * self._size
        turn.num_recomputed_tokens = max(0, num_whole - num_cached_tokens)
        return turn.num_recomputed_tokens

    def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:
        """Says which tool runs after a turn, or that the turn was the program's last."""
        context = self._contexts.get(context_id)
        if context is None:
            return
        context.tool = tool
        if ends and context.returned_at is None:
            self._end(context.program)

    # What the pool says, and is asked to do.

    def note(self, outcome: Outcome) -> None:
        """Notes what is left of contexts, and of other free blocks."""
        self.num_retained_blocks = outcome.num_retained_blocks
        self._num_other_blocks = outcome.num_free_blocks - outcome.num_retained_blocks
        for change in outcome.contexts:
            context = self._contexts.get(change.context)
            if context is None:
                if change.num_blocks:  # it was dropped before its blocks were free
                    self._dropped.append(change.context)
                continue
            if change.num_blocks != context.num_blocks and context.returned_at is not None:
                self.version += 1
            if change.num_blocks < context.num_blocks:
                num_taken = context.num_blocks - change.num_blocks
                self.observer.taken(num_taken, waits=context.returned_at is not None)
            if not (change.num_blocks and context.num_blocks):
                self._ranked = None
            context.num_blocks, context.num_own_blocks = change.num_blocks, change.num_own_blocks

    def operations(self) -> list[Operation]:
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return [DropContexts(dropped)]

    def rank(self) -> list[Operation]:
        """Puts the contexts in the order of their values, the least first."""
        if not self._is_short:
            return []
        ranked = self._by_value()
        if ranked is self._sent:
            return []
        self._sent = ranked
        return [RankContexts([context.id for _, context in ranked])]

    def forget(self) -> None:
        """The pool is empty. Programs and their pauses go on, without blocks."""
        self.first_cold = None
        self._num_other_blocks = self._config.num_blocks - 1
        for context in self._contexts.values():
            context.num_blocks = context.num_own_blocks = 0
        self._last_lost = max(self._contexts, default=self._last_lost)
        self._ranked = None
        self._dropped.clear()
        self.version += 1

    # Decisions about waiting requests.

    def is_warm(self, request: Request) -> bool:
        """Whether at least half of a request's context is cached."""
        context = self._continued.get(request)
        if context is None:
            return False
        num_groups = len(self._config.all_groups)
        return 2 * context.num_blocks * self._size >= context.num_tokens * num_groups

    def is_cold(self, request: Request) -> bool:
        """Whether a request is neither warm nor was admitted before."""
        return not (request.num_preemptions or self.is_warm(request))

    def expected_work(self, request: Request) -> tuple[float, float]:
        """The expected remaining work of a request's program, in tokens, and its arrival."""
        program = self._programs.get(request)
        if program is None:
            return 0.0, 0.0
        return self._ended.expected_tokens(program), program.arrived

    def limit(self, terms: Admission, request: Request, num_running: int) -> None:
        """Says in the terms of an admission beside running requests which blocks it leaves free."""
        if not num_running:
            return
        if self.is_cold(request):
            terms.num_blocks_kept_free = max(terms.num_blocks_kept_free, self._headroom)
        if self._contexts and request is not self.first_cold:
            number = self._num_retained_blocks(num_running) if self._is_short else 0
            terms.num_retained_blocks = number

    def _num_retained_blocks(self, num_running: int) -> int:
        """How many blocks of contexts the next request may take."""
        seconds, gain = self._seconds_per_block(), self._gain(num_running)
        taken = int(self._credit / seconds)
        left, num_worth = gain, 0
        for index, context in self._by_value():
            each = seconds * index
            number = (
                min(context.num_own_blocks, int(left / each)) if each else context.num_own_blocks
            )
            num_worth += number
            left -= number * each
            if number < context.num_own_blocks:
                break
        return max(taken, num_worth)

    def held_up(self, num_running: int) -> str:
        """Only contexts prevent the admission of the next request."""
        now = self._clock()
        if self._held_up_since is None:
            self._why_held_up = self._explanation(num_running, now)
        else:
            self._credit += (now - self._held_up_since) * self._gain(num_running)
        self._held_up_since = now
        return self._why_held_up

    def _explanation(self, num_running: int, now: float) -> str:
        """Which context with the least value is kept, for people."""
        paused = (one for _, one in self._by_value() if one.num_own_blocks)
        kept = next(paused, None)
        if kept is None:
            return ""
        blocks = f"kept {kept.num_own_blocks} blocks of {kept.program.label}"
        seconds = kept.num_own_blocks * self._seconds_per_block()
        costs = f"{seconds:.2f} s to compute again; the next request gains "
        costs += f"{self._gain(num_running):.2f}"
        if kept.returned_at is not None:
            return f"{blocks}: its next turn waits, {costs}"
        age = now - kept.paused_at
        chance, within = self._pauses.best(kept.program.tenant, kept.reason, age)
        back = f"{chance:.2f} back within {within:.2f} s"
        return f"{blocks}: {kept.reason or 'no tool'}, {age:.2f} s in, {back}, {costs}"

    @property
    def _is_short(self) -> bool:
        """Whether the next steps may take blocks of contexts, or a request waits for some."""
        if self._held_up_since is not None:
            return True
        config = self._config
        num_needed = 2 * config.token_budget // self._size + config.max_num_seqs
        return self._num_other_blocks < num_needed * len(config.all_groups) + self._headroom

    def _gain(self, num_running: int) -> float:
        """What one more running request gains, in seconds of the engine for each second."""
        fixed, each = self._costs.seconds_per_step, self._costs.seconds_per_decode
        whole = fixed + num_running * each
        return (fixed / whole if whole else 1.0) / (num_running + 1)

    def _seconds_per_block(self) -> float:
        """The time to compute a block again."""
        costs = self._costs
        each = costs.seconds_per_prompt_token or costs.seconds_per_decode or 1e-6
        return each * self._size

    def _by_value(self) -> list[tuple[float, Context]]:
        """The contexts that have blocks, with the values of their seconds, the least first."""
        now = self._clock()
        if self._ranked is not None and now - self._ranked_at < _RANK_SECONDS:
            return self._ranked
        self._note_ongoing(now)
        waiting, index = 1 / max(_LEAST_WAIT, self._mean_wait), self._pauses.index
        values = [
            (
                waiting
                if context.returned_at is not None
                else index(context.program.tenant, context.reason, now - context.paused_at),
                context.id,
                context,
            )
            for context in self._contexts.values()
            if context.num_blocks
        ]
        if factors := self._tenants_factors():
            values = [
                (value / factors[one.program.tenant], number, one) for value, number, one in values
            ]
        values.sort()
        self._ranked_at = now
        self._ranked = [(value, context) for value, _, context in values]
        return self._ranked

    def _tenants_factors(self) -> dict[bytes, float]:
        """By how much each tenant has more than its weight's share of the retained blocks, at least
        1. Empty if only one tenant has contexts.
        """
        blocks, weights = Counter[bytes](), dict[bytes, float]()
        for context in self._contexts.values():
            blocks[context.program.tenant] += context.num_own_blocks
            weights[context.program.tenant] = context.program.weight
        total = blocks.total()
        if len(weights) < 2 or not total:
            return {}
        each = total / sum(weights.values())
        return {one: max(1.0, blocks[one] / (weight * each)) for one, weight in weights.items()}

    def _note_ongoing(self, now: float) -> None:
        if now < self._noted_at + _ONGOING_SECONDS:
            return
        self._noted_at = now
        self._pauses.note_ongoing(
            (one.program.tenant, one.reason, now - one.paused_at)
            for one in self._contexts.values()
            if one.returned_at is None
        )

    def _forget_idle(self) -> None:
        """Presumes that programs have ended which paused for long, and the longest if too many."""
        for context in self._known.idle(self._clock()):
            program = context.program
            if program.num_running or len(program.contexts) > 1:
                self._known.end_pause(context)
                self._drop(context)
            else:
                self._presume_ended(program)

    def paused(self, most: int, now: float) -> list[PausedProgram]:
        latest = reversed(self._contexts.values())
        contexts = (one for one in latest if one.num_blocks and one.returned_at is None)
        return [
            PausedProgram(
                one.program.label,
                one.program.tenant,
                one.reason,
                now - one.paused_at,
                one.program.num_turns,
                one.num_tokens,
                one.num_blocks,
            )
            for one in islice(contexts, most)
        ]

    @property
    def num_in_turn(self) -> int:
        """Programs with a turn that waits or runs."""
        return len(self._programs)

    @property
    def num_paused(self) -> int:
        return self._known.num_paused

    def _presume_ended(self, program: Program) -> None:
        """A program has been idle for long, so that it will not come back."""
        for context in program.contexts.values():
            self._pauses.ended(program.tenant, context.reason, NEVER)
        self._end(program)

    def _end(self, program: Program) -> None:
        """A program has no further turn."""
        if program.has_ended:
            return
        self._ended.add(program)
        self.observer.ended(program.last_active - program.arrived, program.num_turns)
        for context in self._known.end(program):
            self._drop(context)

    def _drop(self, context: Context) -> None:
        del self._contexts[context.id]
        self._ranked = None
        if context.id > self._last_lost:
            self._dropped.append(context.id)
