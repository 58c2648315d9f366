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


@dataclass(frozen=True)  # without slots: cached properties are stored in the instance
class SchedulerConfig:
    """The scheduler's configuration. Names and meanings are vLLM's. Unless stated otherwise, token
    counts are per step.
    """

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
    """The largest number of prompt tokens of one request in a step with other requests; 0: no
    limit.
    """
    long_prefill_token_threshold_adaptive: bool = False
    """Raise a nonzero threshold to `max_num_batched_tokens` divided by the number of requests, if
    that is larger.
    """
    max_num_scheduled_tokens: int | None = None
    """A token budget below max_num_batched_tokens, the size that the workers are built for."""
    max_num_active_seqs: int | None = None
    """A limit of running requests below max_num_seqs, the size of the workers' batch."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if there are free blocks for its whole sequence, not just for its first
    chunk.
    """
    async_scheduling: bool = False
    """Plan a step while the one before it runs, with placeholders for its tokens."""
    num_speculative_tokens: int = 0
    """The largest number of drafts that the workers propose for each request and step."""
    num_speculative_rows: int = 0
    """The largest number of rows for tokens and drafts of the running requests in a step. All
    requests get the same number of drafts, as many as fit. 0: each gets `num_speculative_tokens`.
    """
    num_lookahead_tokens: int = 0
    """Slots that a draft model needs beyond a step's tokens. Used by recordings and replays."""
    drop_last_hit_block: bool = False
    """Whether the pool omits the last block of a prefix hit, for a draft head (EAGLE). Set by the
    description of a worker. No present worker has such a head.
    """
    pooling: bool = False
    """Whether the workers answer each prompt with a vector instead of tokens (vLLM's runner type
    "pooling"). A request then ends with the step that computes the last token of its prompt.
    """
    prefill_schedule_interval: int = 1
    """While requests decode, compute prompts only in one of this many steps."""
    pipeline_parallel_size: int = 1
    """Number of stages that a model is divided into. Each stage has a step in flight."""
    watermark: float = 0.0
    """Fraction of the pool's blocks that must stay free when a request joins running requests."""
    encoder_compute_budget: int = 0
    """The largest number of embeddings that the encoder computes in one step."""
    encoder_cache_size: int = 0
    """Number of embeddings of prompt items that the workers cache; 0: prompts have no items."""
    disable_chunked_mm_input: bool = False
    """End a chunk before an item of the prompt that it would split."""
    max_loras: int | None = None
    """Number of adapters that running requests may use at once; None: adapters are refused."""
    kv_role: KVRole | None = None
    """The direction in which a connector moves keys and values; None: there is no connector."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.FAIL
    """What happens to requests whose load through the connector failed."""
    requires_kv_delivery: bool = False
    """Whether the output in flight of a preempted request is dropped, because the connector must
    deliver the blocks from which it was computed.
    """
    supports_divergent_local_hybrid_hits: bool = False
    """Whether the connector always loads the states of state-space layers. Then a load may begin
    where the local hit of full attention ends, even if no state is cached there.
    """
    groups: tuple[KVCacheGroup, ...] = ()
    """KV-cache groups, each with a block table. Empty: one group of full attention."""
    prefix_match_unit: int | None = None
    """Number of tokens in a block hash; None: as large as the blocks of all groups allow."""
    prefix_cache_retention_interval: int | None = None
    """Distance, in tokens, of the windows or states that the pool keeps findable. Positions where
    later requests are likely to continue are always findable. 0: only these; None: all.
    """

    @cached_property
    def token_budget(self) -> int:
        """Number of tokens that a step may compute."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @cached_property
    def max_prompt_len(self) -> int:
        """The length of the longest prompt. A generative model needs space for one more token."""
        return self.max_model_len if self.pooling else self.max_model_len - 1

    @cached_property
    def num_steps_in_flight(self) -> int:
        """The largest number of steps whose output has not been applied."""
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @cached_property
    def max_running(self) -> int:
        """The largest number of requests that run at once."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    def num_reserve_slots(self, num_tokens: int) -> int:
        """Number of slots for which free blocks must exist when a request with `num_tokens` tokens
        is admitted, if its first step needs fewer.
        """
        return num_tokens if self.scheduler_reserve_full_isl else 0

    @cached_property
    def fences_frees(self) -> bool:
        """Whether blocks that a step in flight writes may only be freed after the step's output.
        Loads are not ordered with the steps, so a load could fill a block before the step
        overwrites it.
        """
        return self.num_steps_in_flight > 1 and self.kv_role in (KVRole.BOTH, KVRole.CONSUMER)

    @cached_property
    def full_block_sizes(self) -> tuple[int, ...]:
        """Block sizes of the groups that keep all blocks of a request while it runs."""
        return tuple(
            group.block_size
            for group in self.all_groups
            if group.attention_type is AttentionType.FULL
        )

    @cached_property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups. If `groups` is empty, one group of full attention."""
        return self.groups or (KVCacheGroup(AttentionType.FULL, self.block_size),)

    @cached_property
    def only_grows(self) -> bool:
        """Whether all block tables of a request have one length, and only grow while it runs."""
        return all(
            group.attention_type is AttentionType.FULL and group.block_size == self.block_size
            for group in self.groups
        )

    @cached_property
    def foretells_hits(self) -> bool:
        """Whether the prefix hit of a request can be computed from the published hashes alone. That
        requires groups of full attention only, and hits that end at block boundaries.
        """
        return self.only_grows and self.hash_block_size == self.block_size

    @cached_property
    def holds_states(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return any(group.attention_type is AttentionType.STATE_SPACE for group in self.all_groups)

    @cached_property
    def aligns_states(self) -> bool:
        """Whether state-space layers cache states at block boundaries, so that prefixes can be hit.

        Such layers store one state in each step, so the steps of a prompt must end at block
        boundaries.
        """
        return any(group.aligns_states for group in self.groups)

    @cached_property
    def overwrites_states(self) -> bool:
        """Whether state-space layers keep only the latest state."""
        return any(group.overwrites_states for group in self.groups)

    @cached_property
    def hash_block_size(self) -> int:
        """Number of tokens in one block hash."""
        return hash_block_size(
            self.all_groups,
            self.prefix_match_unit,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @cached_property
    def hits_may_diverge(self) -> bool:
        """Whether a hit may count full attention only, because a connector supplies the states."""
        return self.supports_divergent_local_hybrid_hits and self.aligns_states

    @cached_property
    def has_partial_hits(self) -> bool:
        """Whether prefix hits may end inside a block."""
        return self.enable_prefix_caching and has_partial_hits(self.groups, self.hash_block_size)

    def num_drafts(self, num_running: int) -> int:
        """The largest number of drafts of each request in a step with `num_running` requests."""
        most, num_rows = self.num_speculative_tokens, self.num_speculative_rows
        if not most or not num_rows or not num_running:
            return most
        return min(most, max(num_rows // num_running - 1, 0))

    @cached_property
    def max_in_flight_tokens(self) -> int:
        """The largest number of tokens in all steps in flight."""
        return self.max_num_batched_tokens * self.num_steps_in_flight

    @cached_property
    def num_watermark_blocks(self) -> int:
        """The watermark in blocks."""
        return int(self.watermark * self.num_blocks)
