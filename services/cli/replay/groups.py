from services.cli.replay.fields import Field, FieldError
from services.common.errors import InvalidArgument
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.kvpool.core.pool_config import PoolConfig
from services.scheduler.core.config import SchedulerConfig

MAX_GROUPS = 64
_MAX_TOKENS = 10**6


def read_group(group: Field) -> KVCacheGroup:
    """A group in the format of a step log's header. Raises FieldError."""
    return KVCacheGroup(
        group["attention_type"].member(AttentionType),
        group["block_size"].integer(1, _MAX_TOKENS),
        group["window"].integer(),
        group["num_layers"].integer(),
        group["is_eagle_group"].boolean(),
        group["mamba_cache_mode"].member(MambaCacheMode),
        group["num_speculative_blocks"].integer(0, 1000),
    )


def pool_config_of(config: SchedulerConfig) -> PoolConfig:
    return PoolConfig(
        num_blocks=config.num_blocks,
        groups=config.all_groups,
        enable_prefix_caching=config.enable_prefix_caching,
        drop_last_hit_block=config.drop_last_hit_block,
        prefix_match_unit=config.prefix_match_unit,
        prefix_cache_retention_interval=config.prefix_cache_retention_interval,
        max_model_len=config.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
    )


def require_a_pool(config: SchedulerConfig, field: Field) -> None:
    """Raises FieldError, which names `field`, if no pool is possible for `config`."""
    try:
        pool_config_of(config).validate()
    except InvalidArgument as error:
        raise FieldError(field.path, f"cannot be served: {error.message}") from None
