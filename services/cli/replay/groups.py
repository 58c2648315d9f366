"""Reads the KV-cache groups of a step log's header, and checks that a pool can have them."""

from services.cli.replay.fields import Field, FieldError
from services.common.errors import InvalidArgument
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.scheduler.core.config import SchedulerConfig
from services.simulation.inprocess_pool import pool_config_of

MAX_GROUPS = 64
_MAX_TOKENS = 10**6


def read_group(group: Field) -> KVCacheGroup:
    """Reads a group in the format of a step log's header. Raises FieldError."""
    return KVCacheGroup(
        group["attention_type"].member(AttentionType),
        group["block_size"].integer(1, _MAX_TOKENS),
        group["window"].integer(),
        group["num_layers"].integer(),
        group["is_eagle_group"].boolean(),
        group["mamba_cache_mode"].member(MambaCacheMode),
        group["num_speculative_blocks"].integer(0, 1000),
    )


def require_a_pool(config: SchedulerConfig, field: Field) -> None:
    """Raises FieldError, which names `field`, if no pool is possible for `config`."""
    try:
        pool_config_of(config).validate()
    except InvalidArgument as error:
        raise FieldError(field.path, f"cannot be served: {error.message}") from None
