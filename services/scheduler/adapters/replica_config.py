"""Derives the scheduler's configuration from its settings and the workers' description."""

from dataclasses import replace
from typing import Any

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import FailedPrecondition
from services.common.pool.kv_cache_groups import chain_block_size
from services.common.process.settings import flag_name
from services.common.request.messages import pooler_to_proto
from services.common.rpc.protocol import own_release
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.capacity import config_conflict, max_request_tokens
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy
from services.scheduler.core.policies import (
    POLICY_SETTINGS,
    find_policy,
    holds_ended,
    retains_contexts,
    unused_settings,
)
from services.scheduler.options.listed import TRANSFERS
from services.scheduler.settings import SchedulerSettings

SHORTEST_SEQUENCE = 2
"""Number of tokens of the shortest sequence: one prompt token and one generated token."""


def scheduler_config(settings: SchedulerSettings, shape: ReplicaShape) -> SchedulerConfig:
    """Combines the settings with the model, the step sizes and the number of blocks that the
    workers report. Raises FailedPrecondition if a setting cannot work with this replica.
    """
    built, whole = shape.description, shape.takes_whole_prompts
    num_stages = shape.pipeline_parallel_size
    config = SchedulerConfig(
        max_num_seqs=built.max_num_seqs,
        max_num_batched_tokens=built.max_num_batched_tokens,
        max_model_len=built.max_model_len,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        fingerprint=built.fingerprint,
        policy=settings.policy,
        # With several pipeline stages, the first stage gets sampled tokens only from the
        # scheduler, so a step cannot be planned before the previous step's tokens have arrived.
        async_scheduling=settings.async_scheduling and num_stages == 1,
        pipeline_parallel_size=num_stages,
        enable_prefix_caching=settings.enable_prefix_caching and not whole,
        prefix_match_unit=settings.prefix_match_unit,
        enable_chunked_prefill=settings.enable_chunked_prefill and not whole,
        pooling=shape.pooler is not None,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
        scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
        max_num_active_seqs=settings.max_num_active_seqs,
        prefill_schedule_interval=settings.prefill_schedule_interval,
        watermark=settings.watermark,
        groups=shape.groups,
        drop_last_hit_block=built.drop_last_hit_block,
        max_loras=built.max_loras or None,
        num_speculative_tokens=built.num_speculative_tokens,
        num_speculative_rows=built.num_speculative_rows,
        kv_role=TRANSFERS.role(built.num_tier_blocks),
        kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE,
        **_policy_settings(settings),
    )
    if whole:  # the threshold would divide prompts
        config = replace(config, long_prefill_token_threshold=0)
    config = replace(config, max_model_len=max_request_tokens(config))
    _check(config, settings, shape)
    return config


def _policy_settings(settings: SchedulerSettings) -> dict[str, Any]:
    """The settings of scheduling policies that have a value. Raises FailedPrecondition if the
    selected policy does not use one of them.
    """
    given = {name: getattr(settings, name) for name in POLICY_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    if unused := unused_settings(settings.policy, given):
        raise FailedPrecondition(
            f"{flag_name(unused[0])} has no effect with policy {settings.policy}: unset it"
        )
    return given


def _check(config: SchedulerConfig, settings: SchedulerSettings, shape: ReplicaShape) -> None:
    """Raises FailedPrecondition if a setting cannot work with this replica."""
    if config.max_model_len < SHORTEST_SEQUENCE:
        raise FailedPrecondition(
            f"the worker's KV cache of {shape.num_blocks} blocks, one of them the null block, "
            f"cannot store a single token in each of {len(config.groups)} KV-cache groups: give "
            "the KV cache more memory"
        )
    if conflict := TRANSFERS.conflict(config):
        raise FailedPrecondition(conflict)
    if config.kv_role and holds_ended(config.policy):
        raise FailedPrecondition(
            f"policy {config.policy} does not work with workers that keep offloaded blocks "
            "(kv_offloading_size)"
        )
    if settings.prefix_match_unit is not None and not config.aligns_states:
        raise FailedPrecondition(
            "prefix_match_unit is for models with recurrent layers whose states are cached: "
            "without them prefixes are found in whole blocks"
        )
    if conflict := config_conflict(config):
        raise FailedPrecondition(conflict)


def session_opened_to_proto(
    shape: ReplicaShape, config: SchedulerConfig, incarnation: str
) -> scheduler_pb2.SessionOpened:
    """The first message of a gateway's session: the replica's model and limits."""
    built = shape.description
    return scheduler_pb2.SessionOpened(
        incarnation=incarnation,
        release=own_release(),
        model_name=built.model_name,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        max_request_tokens=config.max_model_len,
        fingerprint=built.fingerprint,
        tokenizer_fingerprint=built.tokenizer_fingerprint,
        block_size=chain_block_size(config.all_groups),
        hash_block_size=config.hash_block_size,
        eos_token_ids=built.eos_token_ids,
        priority_scheduling=find_policy(config.policy).uses_priority,
        retains_contexts=retains_contexts(config.policy),
        hidden_size=built.hidden_size,
        max_num_seqs=config.max_running,
        pooler=pooler_to_proto(shape.pooler),
    )
