"""Reads KV-cache groups from scenarios, in vLLM's names."""

from services.cli.replay.fields import Field
from services.cli.replay.groups import MAX_GROUPS
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode

_MAX_TOKENS = 10**6
_KINDS = {
    "full": (AttentionType.FULL, ()),
    "sliding": (AttentionType.SLIDING_WINDOW, ("window",)),
    "chunked": (AttentionType.CHUNKED_LOCAL, ("chunk",)),
    "mamba": (AttentionType.STATE_SPACE, ("mode", "speculative_blocks")),
}


def read_scenario_groups(field: Field, block_size: int) -> tuple[KVCacheGroup, ...]:
    """The groups of a scenario. Empty if the field is null. Raises FieldError."""
    if field.value is None:
        return ()
    groups = tuple(_scenario_group(group, block_size) for group in field.items())
    if not 0 < len(groups) <= MAX_GROUPS:
        raise field.wrong(f"must list 1 to {MAX_GROUPS} groups")
    return groups


def _scenario_group(group: Field, block_size: int) -> KVCacheGroup:
    kind, names = _KINDS[group["type"].one_of(list(_KINDS))]
    group.only(("type", "block_size", "eagle", *names))
    window = next((group[name].integer(1) for name in names if name in ("window", "chunk")), 0)
    mode = MambaCacheMode.NONE
    if kind is AttentionType.STATE_SPACE:
        mode = group["mode"].member(MambaCacheMode)
    return KVCacheGroup(
        kind,
        group.get("block_size", block_size).integer(1, _MAX_TOKENS),
        window,
        is_eagle_group=group.get("eagle", False).boolean(),
        mamba_cache_mode=mode,
        num_speculative_blocks=group.get("speculative_blocks", 0).integer(0, 1000),
    )
