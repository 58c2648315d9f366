"""Compares the worth of keeping contexts (KV blocks of ended requests of agents) in the pool with
the gain of admitting another request.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from services.common.pool.ids import ContextId
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.program.ended_programs import EndedPrograms
from services.scheduler.core.policies.program.pauses import PauseStatistics
from services.scheduler.core.policies.programs import Context

_RANK_SECONDS = 0.01
"""Seconds for which a computed order of contexts is used."""
_ONGOING_SECONDS = 2.0
"""Interval, in seconds, at which the lengths of pauses that have not ended are updated."""
_WAIT_SMOOTHING = 0.1
_RETURN_SMOOTHING = 0.05
_LEAST_WAIT = 0.05

Ranked = list[tuple[float, Context]]
"""Pairs of a context's value, in 1 / second, and the context, the smallest value first."""


class Worth:
    """Compares the worth of contexts with the gain of running the next request beside them.

    A context is the blocks that an ended turn of a program (a run of an agent) leaves in the pool.
    Its worth is the time to compute its blocks again, in seconds, times its value, in 1 / second.
    The value is large if the program's next turn will probably arrive soon. The gain is the
    fraction of the engine's time that one more running request saves. Both are dimensionless.
    """

    def __init__(
        self, parts: PolicyParts, contexts: Mapping[ContextId, Context], ended: EndedPrograms
    ) -> None:
        """`contexts` are the contexts that the policy retains, and changes later. `ended` receives
        paused programs that have probably ended.
        """
        self._ended = ended
        self._costs = parts.step_costs
        config = parts.config
        self._size = config.hash_block_size
        self._num_groups = len(config.all_groups)
        self._is_whole = not config.only_grows
        """Whether a context is useless unless all of its blocks are cached."""
        self._contexts = contexts
        self.pauses = PauseStatistics()
        self._noted_at = -_ONGOING_SECONDS
        """The time at which the lengths of pauses that have not ended were last updated."""
        self._ranked: Ranked | None = None
        """The stored result of `ranked`, computed at the time `_ranked_at`."""
        self._ranked_at = 0.0
        self._mean_wait = 1.0
        self._credit = 0.0
        self._held_up_since: float | None = None
        self._why_held_up = ""
        self._num_loaded = self._num_recomputed = 0.0
        """Means of two numbers over recent returns of programs: how many context tokens were loaded
        from host memory, and how many were computed again.
        """

    @property
    def is_held_up(self) -> bool:
        """Whether only the kept contexts prevent the admission of the next request."""
        return self._held_up_since is not None

    @property
    def loaded_share(self) -> float:
        """The fraction of lost context tokens that were loaded from host memory, and not computed
        again, in recent returns of programs.
        """
        num_lost = self._num_loaded + self._num_recomputed
        return self._num_loaded / num_lost if num_lost else 0.0

    def changed(self) -> None:
        """Must be called when a context gets its first block, loses its last one, or is dropped."""
        self._ranked = None

    def admitted(self, waited: float | None) -> None:
        """Called when a request was admitted. `waited` is the number of seconds for which it waited
        while its context was kept. None if it continues no kept context.
        """
        self.nobody_waits()
        if waited is not None:
            self._mean_wait += _WAIT_SMOOTHING * (waited - self._mean_wait)

    def nobody_waits(self) -> None:
        """Must be called if the last waiting request was aborted. Otherwise the next request would
        get credit for the time since then.
        """
        self._credit, self._held_up_since = 0.0, None

    def returned(self, num_loaded: int, num_recomputed: int) -> None:
        """Called when a program's turn has ended whose context was not fully cached: `num_loaded`
        of its tokens were loaded from host memory, and `num_recomputed` computed again.
        """
        self._num_loaded += _RETURN_SMOOTHING * (num_loaded - self._num_loaded)
        self._num_recomputed += _RETURN_SMOOTHING * (num_recomputed - self._num_recomputed)

    def held_up(self, num_running: int, now: float) -> str:
        """Called when only kept contexts have prevented the admission of the next request. The
        request's credit grows while it waits, so that it may evict contexts later. Returns a text
        that explains which context is kept, and why.
        """
        if self._held_up_since is None:
            self._why_held_up = self._explanation(num_running, now)
        else:
            self._credit += (now - self._held_up_since) * self._gain(num_running)
        self._held_up_since = now
        return self._why_held_up

    def num_blocks(self, num_running: int, now: float) -> int:
        """Number of blocks of contexts that may be evicted to admit the next request."""
        ranked = self.ranked(now)
        return max(
            self._num_blocks_below(self._gain(num_running), ranked),
            self._num_blocks_below(self._credit, ((1.0, context) for _, context in ranked)),
        )

    def _num_blocks_below(self, most: float, ranked: Iterable[tuple[float, Context]]) -> int:
        """Number of blocks of the first contexts of `ranked` that together cost at most `most`. The
        cost of a context is its `seconds` times its number in `ranked`.
        """
        num_blocks = 0
        for value, context in ranked:
            cost, number = self.seconds(context) * value, context.num_own_blocks
            if cost > most:
                return num_blocks if self._is_whole else num_blocks + int(number * most / cost)
            num_blocks, most = num_blocks + number, most - cost
        return num_blocks

    def seconds(self, context: Context) -> float:
        """Seconds to compute or load tokens again, if the context's own blocks were evicted."""
        if self._is_whole:
            return self._seconds_per_token() * context.num_tokens if context.num_own_blocks else 0.0
        num_tokens = context.num_own_blocks * self._size / self._num_groups
        return self._seconds_per_token() * num_tokens

    def ranked(self, now: float) -> Ranked:
        if self._ranked is not None and now - self._ranked_at < _RANK_SECONDS:
            return self._ranked
        self._note_ongoing(now)
        waiting, index = 1 / max(_LEAST_WAIT, self._mean_wait), self.pauses.index
        values = [
            (
                waiting
                if context.returned_at is not None
                else index(context.program.tenant, context.reason, now - context.paused_at)
                if not context.keep_seconds
                else self._wished_index(context, now - context.paused_at),
                context.id,
                context,
            )
            for context in self._contexts.values()
            if context.num_blocks
        ]
        if factors := self.tenants_factors():
            values = [
                (value / factors[one.program.tenant], number, one) for value, number, one in values
            ]
        values.sort()
        self._ranked_at = now
        self._ranked = [(value, context) for value, _, context in values]
        return self._ranked

    def _wished_index(self, context: Context, age: float) -> float:
        """The value of a context that the client wants to be kept for `keep_seconds`. For this
        time, it is at least half of the value at the beginning of the pause.
        """
        tenant, reason = context.program.tenant, context.reason
        index = self.pauses.index(tenant, reason, age)
        if age < context.keep_seconds:
            return max(index, self.pauses.index(tenant, reason, 0.0) / 2)
        return index

    def tenants_factors(self) -> dict[bytes, float]:
        """Maps each tenant to the number by which its contexts' values are divided. This is the
        tenant's number of blocks in contexts, divided by the number to which its weight entitles
        it, and at least 1. Empty if only one tenant has contexts.
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
        paused = [one for one in self._contexts.values() if one.returned_at is None]
        self.pauses.note_ongoing(
            (one.program.tenant, one.reason, now - one.paused_at) for one in paused
        )
        for one in paused:
            program, age = one.program, now - one.paused_at
            is_idle = not program.num_running and len(program.contexts) == 1
            if is_idle and self.pauses.is_unusual(program.tenant, one.reason, age):
                self._ended.presume(program)

    def _gain(self, num_running: int) -> float:
        """The fraction of the engine's time per token that one further running request saves."""
        fixed, each = self._costs.seconds_per_step, self._costs.seconds_per_decode
        whole = fixed + num_running * each
        return (fixed / whole if whole else 1.0) / (num_running + 1)

    def _seconds_per_token(self) -> float:
        """Seconds to compute or load a token of a context again. Assumes that the fraction of
        tokens that are loaded is `loaded_share`. A load counts only if it is faster than computing.
        """
        costs = self._costs
        each = costs.seconds_per_prompt_token or costs.seconds_per_decode or 1e-6
        return each - self.loaded_share * max(0.0, each - costs.seconds_per_loaded_token)

    def _explanation(self, num_running: int, now: float) -> str:
        """A text that explains why the context with the smallest value is kept."""
        kept = next((one for _, one in self.ranked(now) if one.num_own_blocks), None)
        if kept is None:
            return ""
        blocks = f"kept {kept.num_own_blocks} cached blocks of program {kept.program.label}"
        seconds = self.seconds(kept)
        gain = self._gain(num_running)
        costs = (
            f"to compute them again takes {seconds:.2f} s; "
            f"one more running request saves {gain:.0%} of the time per token"
        )
        if kept.returned_at is not None:
            return f"{blocks}, whose next turn waits; {costs}"
        age = now - kept.paused_at
        chance, within = self.pauses.best(kept.program.tenant, kept.reason, age)
        pause = f"which pauses for {age:.2f} s ({kept.reason or 'no tool is known'})"
        back = f"and continues within {within:.2f} s with probability {chance:.2f}"
        if age < kept.keep_seconds:
            back += f", to be kept for {kept.keep_seconds} s"
        return f"{blocks}, {pause} {back}; {costs}"
