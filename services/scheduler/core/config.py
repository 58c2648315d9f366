"""The configuration of one replica's scheduler: limits, thresholds, policy."""

from dataclasses import dataclass
from functools import cached_property

from services.common.pool.kv_cache_groups import (
    AttentionType,
    KVCacheGroup,
    has_partial_hits,
    hash_block_size,
)
from services.scheduler.core.transfers.kv_role import KVLoadFailurePolicy, KVRole


@dataclass(frozen=True)  # without slots: what is derived of it is kept beside the fields
class SchedulerConfig:
    """Names and meanings are vLLM's. Token counts are per step unless said otherwise."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Blocks in the pool, the null block included."""
    fingerprint: bytes = b""
    """Root of the block-hash chain."""
    policy: str = "fcfs"
    """A name of `policies.POLICIES`."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step that others share; 0: no such limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise the threshold, if there is one, to an even share of the step where that is more."""
    max_num_scheduled_tokens: int | None = None
    """A budget below max_num_batched_tokens, the size that the workers are built for."""
    max_num_active_seqs: int | None = None
    """A limit below max_num_seqs, the size that the workers' batch is built for."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if there are free blocks for its whole sequence, not just for its first
    chunk.
    """
    async_scheduling: bool = False
    """Plan a step while the one before it runs, with placeholders for its tokens."""
    num_speculative_tokens: int = 0
    """Drafts that the workers propose for each request and step, at most."""
    num_speculative_rows: int = 0
    """Rows that the tokens and drafts of the running requests are to fill in a step: each has as
    many drafts as fit, the same number for all; 0: each has `num_speculative_tokens`.
    """
    num_lookahead_tokens: int = 0
    """Slots that a draft model needs beyond a step's tokens. Used by recordings and replays."""
    drop_last_hit_block: bool = False
    """Whether the pool leaves the last block of a prefix hit out, for a draft head (EAGLE). Set by
    the description of a worker; none sets it before a worker has such a head.
    """
    pooling: bool = False
    """Whether the workers answer each prompt with a vector instead of tokens (vLLM's runner type
    "pooling"): a request ends with the step that computes the last token of its prompt.
    """
    prefill_schedule_interval: int = 1
    """While requests decode, compute prompts only in one of this many steps."""
    pipeline_parallel_size: int = 1
    """Stages that a model is divided into; each has a step in flight."""
    watermark: float = 0.0
    """Share of the pool that stays free when a request joins running ones."""
    encoder_compute_budget: int = 0
    """Embeddings that the encoder computes in one step, at most."""
    encoder_cache_size: int = 0
    """Embeddings that the workers keep of items of prompts; 0: prompts have no items."""
    disable_chunked_mm_input: bool = False
    """End a chunk before an item of the prompt that it would split."""
    max_loras: int | None = None
    """Adapters that running requests may use at once; None: no request may have one."""
    kv_role: KVRole | None = None
    """Which way a connector moves keys and values; None: there is no connector."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.FAIL
    """What happens to requests whose load through the connector failed."""
    requires_kv_delivery: bool = False
    """Whether output of a preempted request that is in flight is dropped, since the connector must
    hand on the blocks that it was computed from.
    """
    supports_divergent_local_hybrid_hits: bool = False
    """Whether the connector's loads bring the states of state-space layers, whatever is cached of
    them, so that a load may begin where the local hit of full attention ends.
    """
    groups: tuple[KVCacheGroup, ...] = ()
    """Groups of layers with a block table each; empty: one, of full attention."""
    prefix_match_unit: int | None = None
    """Tokens of a block hash; None: as large as the blocks of all groups allow."""
    prefix_cache_retention_interval: int | None = None
    """Tokens between two windows or states that the pool lets be found, besides those where later
    requests are likely to continue; 0: only the latter; None: all.
    """

    @cached_property
    def token_budget(self) -> int:
        """Tokens that a step hands out."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @cached_property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: one that is to be continued must leave room for a token."""
        return self.max_model_len if self.pooling else self.max_model_len - 1

    @cached_property
    def num_steps_in_flight(self) -> int:
        """Steps that are planned before the output of the first of them is taken in."""
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @cached_property
    def max_running(self) -> int:
        """Requests that may run at once."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    def num_reserve_slots(self, num_tokens: int) -> int:
        """Slots for which the admission of a request with `num_tokens` needs free blocks, besides
        those of its first step.
        """
        return num_tokens if self.scheduler_reserve_full_isl else 0

    @cached_property
    def fences_frees(self) -> bool:
        """Whether blocks that a step in flight writes must not be free before its output has come:
        a load, which is not ordered with the steps, could fill them before.
        """
        return self.num_steps_in_flight > 1 and self.kv_role in (KVRole.BOTH, KVRole.CONSUMER)

    @cached_property
    def full_block_sizes(self) -> tuple[int, ...]:
        """Block sizes of the groups that hold every block of a request for as long as it runs."""
        return tuple(
            group.block_size
            for group in self.all_groups
            if group.attention_type is AttentionType.FULL
        )

    @cached_property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups, also where there is only the one of full attention."""
        return self.groups or (KVCacheGroup(AttentionType.FULL, self.block_size),)

    @cached_property
    def only_grows(self) -> bool:
        """Whether all block tables of a request are equally long, and only grow while it runs."""
        return all(
            group.attention_type is AttentionType.FULL and group.block_size == self.block_size
            for group in self.groups
        )

    @cached_property
    def foretells_hits(self) -> bool:
        """Whether the prefix hit of a request follows from the blocks that are published: the pool
        finds no shorter one for the sake of another group, nor one that ends inside a block.
        """
        return self.only_grows and self.hash_block_size == self.block_size

    @cached_property
    def holds_states(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return any(group.attention_type is AttentionType.STATE_SPACE for group in self.all_groups)

    @cached_property
    def aligns_states(self) -> bool:
        """Whether state-space layers keep states at block boundaries, by which prefixes are found.

        Such layers store one state a step, so the steps of a prompt must end where blocks end.
        """
        return any(group.aligns_states for group in self.groups)

    @cached_property
    def overwrites_states(self) -> bool:
        """Whether state-space layers keep no state but the last."""
        return any(group.overwrites_states for group in self.groups)

    @cached_property
    def hash_block_size(self) -> int:
        """Tokens that one block hash stands for."""
        return hash_block_size(
            self.all_groups,
            self.prefix_match_unit,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @cached_property
    def hits_may_diverge(self) -> bool:
        """Whether a hit may be one of full attention alone, as a connector supplies the states."""
        return self.supports_divergent_local_hybrid_hits and self.aligns_states

    @cached_property
    def has_partial_hits(self) -> bool:
        """Whether prefix hits may end inside a block."""
        return self.enable_prefix_caching and has_partial_hits(self.groups, self.hash_block_size)

    def num_drafts(self, num_running: int) -> int:
        """Most drafts of each request in a step, with `num_running` requests."""
        most, num_rows = self.num_speculative_tokens, self.num_speculative_rows
        if not most or not num_rows or not num_running:
            return most
        return min(most, max(num_rows // num_running - 1, 0))

    @cached_property
    def max_in_flight_tokens(self) -> int:
        """Most tokens of steps that were planned and whose outputs have not come."""
        return self.max_num_batched_tokens * self.num_steps_in_flight

    @cached_property
    def num_watermark_blocks(self) -> int:
        """The watermark in blocks."""
        return int(self.watermark * self.num_blocks)
