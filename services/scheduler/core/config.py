"""The configuration of one replica's scheduler, such as limits, thresholds and the policy."""

from dataclasses import dataclass
from functools import cached_property

from services.common.pool.kv_cache_groups import (
    AttentionType,
    KVCacheGroup,
    has_partial_hits,
    hash_block_size,
)
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy, KVRole


@dataclass(frozen=True)  # without slots: cached properties are stored in the instance
class SchedulerConfig:
    """The scheduler's configuration. Most names are vLLM's. Limits on tokens apply to one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Number of blocks in the pool, including the null block."""
    fingerprint: bytes = b""
    """Identifies the model. Seeds the hash of every sequence's first block."""
    policy: str = "fcfs"
    """Name of a scheduling policy, as in `policies.POLICIES`."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Limit on the prompt tokens of one request in a step with other requests. 0: no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether a threshold above 0 is raised to `max_num_batched_tokens` / number of requests."""
    max_num_scheduled_tokens: int | None = None
    """The token budget of a step. None selects `max_num_batched_tokens`."""
    max_num_active_seqs: int | None = None
    """Limit on running requests. None selects `max_num_seqs`, the rows of the workers' batch."""
    scheduler_reserve_full_isl: bool = True
    """Whether an admission needs free blocks for all its tokens, not only for the first chunk."""
    async_scheduling: bool = False
    """Whether a step is planned while the previous step still samples its tokens."""
    num_speculative_tokens: int = 0
    """Limit on the draft tokens that the workers propose for each request in a step."""
    num_speculative_rows: int = 0
    """Limit on the tokens of all decoding requests in a step, draft tokens included. Each request
    then has the largest equal number of drafts that keeps the limit. With 0, there is no limit, and
    each request has `num_speculative_tokens` drafts.
    """
    num_lookahead_tokens: int = 0
    """Cache slots of each request for tokens of a draft model. Only set in tests and replays."""
    drop_last_hit_block: bool = False
    """Whether the last block of a prefix hit is computed again, because a draft head (EAGLE) needs
    the block's hidden states. The workers report whether they have such a head.
    """
    pooling: bool = False
    """Whether the workers compute one vector from each prompt instead of sampling tokens (vLLM's
    runner type "pooling"). A request then ends with the step that computes its last prompt token.
    """
    prefill_schedule_interval: int = 1
    """While requests decode, one of this number of steps computes prompts. 1: every step."""
    pipeline_parallel_size: int = 1
    """Number of stages into which the model's layers are divided."""
    watermark: float = 0.0
    """Fraction of the pool's blocks that admissions leave free while requests run."""
    program_idle_seconds: float = 600.0
    """Time without a request after which a program is presumed to have ended. This field and the
    next four are for policies that group requests into programs (runs of agents). A program's
    context is the blocks that its last request has left in the pool for the program's next request.
    """
    max_num_programs: int = 65_536
    """Limit on the number of named programs, and on the number of contexts."""
    retention_headroom: float = 0.1
    """Fraction of the pool that admissions without a cached context leave to running requests."""
    aging_interval: int = 8
    """Every n-th admission without a cached context admits the longest waiting request. Sets n."""
    max_warm_admissions: int = 32
    """Limit on admissions of requests with cached contexts while a request without one waits."""
    encoder_compute_budget: int = 0
    """Limit on the embeddings that the encoder computes in one step."""
    encoder_cache_size: int = 0
    """Number of embeddings of prompt items (such as images) that the workers can cache."""
    disable_chunked_mm_input: bool = False
    """Whether a prompt chunk must end before a prompt item (such as an image) that it would split.
    """
    max_loras: int | None = None
    """Limit on the number of different LoRA adapters of running requests. None refuses adapters."""
    kv_role: KVRole | None = None
    """Whether the KV connector loads, stores, or does both. None without a KV connector."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.FAIL
    """What happens to a request if the KV connector could not load some of its blocks."""
    requires_kv_delivery: bool = False
    """Whether tokens that steps in flight sample for a preempted request are discarded."""
    supports_divergent_local_hybrid_hits: bool = False
    """Whether the KV connector always loads the states of state-space layers. A load may then begin
    where the prefix hit of the full-attention layers ends, even if no state is cached there.
    """
    groups: tuple[KVCacheGroup, ...] = ()
    """KV-cache groups (layers that share a block table). Empty means one full-attention group."""
    prefix_match_unit: int | None = None
    """Number of tokens of each block hash. None selects the largest that all groups allow."""
    prefix_cache_retention_interval: int | None = None
    """Distance, in tokens, between the positions at which sliding windows and states are published
    (cached for prefix hits). With None, they are published at every block. With a number, they are
    also published where later requests are likely to continue; with 0, only there.
    """

    @cached_property
    def token_budget(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @cached_property
    def max_prompt_len(self) -> int:
        """Limit on the tokens of a prompt. Generative models need room for one output token."""
        return self.max_model_len if self.pooling else self.max_model_len - 1

    @cached_property
    def num_steps_in_flight(self) -> int:
        """Limit on the number of planned steps whose output has not been applied."""
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @cached_property
    def max_running(self) -> int:
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    def num_reserve_slots(self, num_tokens: int) -> int:
        """For how many slots (tokens) blocks must be free to admit `num_tokens` tokens."""
        return num_tokens if self.scheduler_reserve_full_isl else 0

    @cached_property
    def fences_frees(self) -> bool:
        """Whether a block that a step in flight writes is freed only after the step's output has
        arrived. Loads of a KV connector require this, because they are not ordered with the steps.
        Otherwise the step could overwrite a freed block that a load has already filled.
        """
        return self.num_steps_in_flight > 1 and self.kv_role in (KVRole.BOTH, KVRole.CONSUMER)

    @cached_property
    def full_block_sizes(self) -> tuple[int, ...]:
        """Block sizes of the groups that free no block of a request while the request runs."""
        return tuple(
            group.block_size
            for group in self.all_groups
            if group.attention_type is AttentionType.FULL
        )

    @cached_property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        return self.groups or (KVCacheGroup(AttentionType.FULL, self.block_size),)

    @cached_property
    def only_grows(self) -> bool:
        """Whether the block tables of a running request have equal lengths, and never shrink."""
        return all(
            group.attention_type is AttentionType.FULL and group.block_size == self.block_size
            for group in self.groups
        )

    @cached_property
    def foretells_hits(self) -> bool:
        """Whether the published hashes alone determine a request's prefix hit. This is the case if
        all layers have full attention and hits end at block boundaries.
        """
        return self.only_grows and self.hash_block_size == self.block_size

    @cached_property
    def holds_states(self) -> bool:
        """Whether some layers store a state instead of keys and values."""
        return any(group.attention_type is AttentionType.STATE_SPACE for group in self.all_groups)

    @cached_property
    def aligns_states(self) -> bool:
        """Whether state-space layers cache states at block boundaries, for prefix hits. A layer
        stores one state in each step, so the steps of a prompt must end at block boundaries.
        """
        return any(group.aligns_states for group in self.groups)

    @cached_property
    def overwrites_states(self) -> bool:
        """Whether state-space layers keep only the latest state."""
        return any(group.overwrites_states for group in self.groups)

    @cached_property
    def hash_block_size(self) -> int:
        return hash_block_size(
            self.all_groups,
            self.prefix_match_unit,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @cached_property
    def hits_may_diverge(self) -> bool:
        """Whether a prefix hit may count tokens that only full-attention layers have cached."""
        return self.supports_divergent_local_hybrid_hits and self.aligns_states

    @cached_property
    def has_partial_hits(self) -> bool:
        """Whether prefix hits may end inside a block."""
        return self.enable_prefix_caching and has_partial_hits(self.groups, self.hash_block_size)

    def num_drafts(self, num_running: int) -> int:
        """Limit on the drafts of each request in a step with `num_running` requests."""
        most, num_rows = self.num_speculative_tokens, self.num_speculative_rows
        if not most or not num_rows or not num_running:
            return most
        return min(most, max(num_rows // num_running - 1, 0))

    @cached_property
    def max_in_flight_tokens(self) -> int:
        """Limit on the total number of tokens of all steps in flight."""
        return self.max_num_batched_tokens * self.num_steps_in_flight

    @cached_property
    def num_watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)
