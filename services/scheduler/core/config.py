"""The configuration of one replica's scheduler: limits, thresholds, policy."""

from dataclasses import dataclass

from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.core.kv_role import KVLoadFailurePolicy, KVRole


@dataclass(frozen=True, slots=True)
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
    """Raise the threshold to an even share of the step where that is more."""
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
    """Drafts that the workers propose for each request and step. Used today by recordings and
    replays; speculative decoding will use it.
    """
    num_lookahead_tokens: int = 0
    """Slots that a draft model needs beyond the tokens of a step. Used as the drafts are."""
    drop_last_hit_block: bool = False
    """Whether the pool leaves the last block of a prefix hit out, for a draft head (EAGLE). Set by
    the description of a worker; none sets it before a worker has such a head.
    """
    pooling: bool = False
    """Whether the workers answer each prompt with a vector instead of tokens (vLLM's runner type
    "pooling"): a request ends with the step that computes the last token of its prompt.
    """
    prefill_schedule_interval: int = 1
    """While requests decode, compute prompts in one of so many steps only."""
    pipeline_parallel_size: int = 1
    """Stages that a model is divided into; so many steps are in flight."""
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
    """What becomes of requests whose load through the connector failed."""
    requires_kv_delivery: bool = False
    """Whether output of a preempted request that is in flight is dropped, since the connector must
    hand on the blocks that it was computed from.
    """
    groups: tuple[KVCacheGroup, ...] = ()
    """Groups of layers with a block table each; empty: one, of full attention."""

    @property
    def token_budget(self) -> int:
        """Tokens that a step hands out."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: one that is to be continued must leave room for a token."""
        return self.max_model_len if self.pooling else self.max_model_len - 1

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that are planned before the output of the first of them is taken in."""
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @property
    def max_running(self) -> int:
        """Requests that may run at once."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    @property
    def fences_frees(self) -> bool:
        """Whether blocks that a step in flight writes must not be free before its output has come:
        a load, which is not ordered with the steps, could fill them before.
        """
        return self.async_scheduling and self.kv_role in (KVRole.BOTH, KVRole.CONSUMER)

    @property
    def num_full_groups(self) -> int:
        """Groups that hold every block of a request for as long as it runs."""
        return self._count(AttentionType.FULL) if self.groups else 1

    @property
    def caches_states(self) -> bool:
        """Whether prefixes are found by the states that state-space layers stored at their end.

        Such layers store one state a step, so the steps of a prompt must end where blocks end.
        """
        return self.enable_prefix_caching and self._count(AttentionType.STATE_SPACE) > 0

    @property
    def num_watermark_blocks(self) -> int:
        """The watermark in blocks."""
        return int(self.watermark * self.num_blocks)

    def _count(self, attention_type: AttentionType) -> int:
        return sum(group.attention_type is attention_type for group in self.groups)
