"""Generates random worlds (simulated replicas with their requests and failures) from numbers. A
number always yields the same world.
"""

from dataclasses import replace
from random import Random
from typing import Any

from services.common.errors import InvalidArgument
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.capacity import config_conflict, max_request_tokens
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy, KVRole
from services.scheduler.core.policies import POLICIES, holds_ended, retains_contexts
from services.simulation.inprocess_pool import pool_config_of
from tests.scenarios.connector import HAS_TRANSFERS
from tests.worlds.arrivals import LAST_ARRIVAL, MAX_ITEM, MAX_OUTPUT, MAX_PROMPT, make_arrival
from tests.worlds.world import Arrival, Event, Incident, World

FAMILIES = {
    "groups": 0.5,
    "drafts": 0.3,
    "async": 0.4,
    "stages": 0.2,
    "connector": 0.35,
    "tier": 0.3,
    "encoder": 0.25,
    "adapters": 0.3,
    "grammars": 0.3,
    "sessions": 0.35,
    "pooling": 0.06,
    "pacing": 0.2,
    "pauses": 0.35,
    "resets": 0.35,
    "losses": 0.35,
    "poison": 0.1,
}
"""The features that a world may have, with their probabilities."""
_CONNECTORS = {"connector", "tier"}


def make_world(number: int) -> World:
    random = Random(number)
    while True:
        families = {name for name, share in FAMILIES.items() if random.random() < share}
        families -= _conflicting(families)
        if not HAS_TRANSFERS:
            families -= {"connector", "tier"}
        if "tier" in families and random.random() < 0.7:
            families.add("resets")  # makes loads likely, as cached prefixes are not loaded
        config = _config(random, families)
        if config is not None:
            break
    if retains_contexts(config.policy):
        config = replace(
            config,
            program_idle_seconds=(0.02, 600.0)[number % 2],
            max_num_programs=(2, 1000)[number // 2 % 2],
            retention_headroom=(0.1, 0.0, 0.5)[number % 3],
            aging_interval=(8, 1, 3)[number // 3 % 3],
            max_warm_admissions=(32, 1)[number // 4 % 2],
        )
    arrivals: list[Arrival] = []
    for _ in range(random.randint(2, 30 if retains_contexts(config.policy) else 11)):
        arrivals.append(make_arrival(random, config, families, arrivals))
    return World(
        number,
        config,
        random.random() < 0.3,
        tuple(arrivals),
        _events(random, families),
        random.choice((random.randint(1, 6), random.randint(7, 30), 300, 300))
        if "tier" in families
        else 0,
        frozenset(families),
    )


def _conflicting(families: set[str]) -> set[str]:
    """The features that other features of the world exclude. Prompts that are pooled have no
    output. Workers of several pipeline stages do not feed sampled tokens to the next step, which
    drafts and asynchronous scheduling require. There is only one KV connector.
    """
    conflicts: set[str] = set()
    if "pooling" in families:
        conflicts |= {"drafts", "grammars", "sessions"}
    if "stages" in families:
        conflicts |= {"drafts", "async"}
    if "tier" in families:
        conflicts |= {"connector"}
    return conflicts


# The replica


def _config(random: Random, families: set[str]) -> SchedulerConfig | None:
    """A configuration whose pool fits the longest sequence, but few of these. None if the drawn
    configuration is invalid.
    """
    num_drafts = random.randint(1, 3) if "drafts" in families else 0
    max_model_len = MAX_PROMPT + MAX_OUTPUT + random.randrange(30)
    caching = "tier" in families or random.random() < 0.8
    groups = _groups(random, families, num_drafts, max_model_len, caching=caching)
    kinds = {group.attention_type for group in groups}
    block_size = next(
        (group.block_size for group in groups if group.aligns_states), groups[0].block_size
    )
    chunked = random.random() < 0.85
    least = max([1 + num_drafts, *(group.block_size for group in groups if group.aligns_states)])
    budget = least + random.randrange(random.choice((4, 30, 60)))
    if "encoder" in families:
        budget = max(budget, MAX_ITEM + num_drafts)
    if not chunked:
        budget = max_model_len + num_drafts
    max_num_seqs = random.randint(1, 6)
    named: dict[str, Any] = {
        "policy": random.choice(
            [name for name in POLICIES if not holds_ended(name) or families.isdisjoint(_CONNECTORS)]
        ),
        "block_size": block_size,
        "num_blocks": 2,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_active_seqs": random.choice((None, None, random.randint(1, max_num_seqs))),
        "max_num_batched_tokens": budget + random.choice((0, 8)),
        "max_num_scheduled_tokens": random.choice((None, budget)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": caching,
        "long_prefill_token_threshold": _threshold(random, families),
        "long_prefill_token_threshold_adaptive": random.random() < 0.3,
        "scheduler_reserve_full_isl": random.random() < 0.6,
        "watermark": random.choice((0.0, 0.0, 0.1, 0.3)),
        "async_scheduling": "async" in families,
        "pipeline_parallel_size": random.randint(2, 3) if "stages" in families else 1,
        "num_speculative_tokens": num_drafts,
        "num_lookahead_tokens": random.choice((0, num_drafts)),
        "pooling": "pooling" in families,
        "prefill_schedule_interval": random.randint(2, 4) if "pacing" in families else 1,
        "max_loras": random.randint(1, 3) if "adapters" in families else None,
        "groups": groups if "groups" in families else (),
        "drop_last_hit_block": (
            bool(num_drafts) and random.random() < 0.4 and AttentionType.CHUNKED_LOCAL not in kinds
        ),
    }
    if "encoder" in families:
        named |= {
            "encoder_compute_budget": random.randint(MAX_ITEM, 3 * MAX_ITEM),
            "encoder_cache_size": random.randint(MAX_ITEM, 4 * MAX_ITEM),
            "disable_chunked_mm_input": random.random() < 0.3,
        }
        if named["disable_chunked_mm_input"]:  # an adaptive threshold may be smaller than an item
            named["long_prefill_token_threshold_adaptive"] = False
    if "connector" in families:
        named |= {
            "kv_role": random.choice((KVRole.BOTH, KVRole.CONSUMER, KVRole.PRODUCER)),
            "kv_load_failure_policy": random.choice(tuple(KVLoadFailurePolicy)),
            "requires_kv_delivery": random.random() < 0.3,
            # Loads restore the states of state-space layers, but not the blocks of a window.
            "supports_divergent_local_hybrid_hits": kinds
            <= {AttentionType.FULL, AttentionType.STATE_SPACE}
            and random.random() < 0.3,
        }
    if "tier" in families:
        named |= {"kv_role": KVRole.BOTH, "kv_load_failure_policy": KVLoadFailurePolicy.RECOMPUTE}
    if caching and len(groups) > 1 and random.random() < 0.3:
        named["prefix_match_unit"] = min(group.block_size for group in groups)
    if caching and random.random() < 0.3:
        size = max(group.block_size for group in groups)
        named["prefix_cache_retention_interval"] = random.choice((0, size, 2 * size, 4 * size))
    return _with_pool(random, SchedulerConfig(**named))


def _threshold(random: Random, families: set[str]) -> int:
    """The threshold for long prefills. It is 0 (none) if requests have multimodal items, because an
    item must not be chunked and a threshold could be smaller than it.
    """
    if "encoder" in families:
        return 0
    return random.choice((0, 0, 3, 9))


def _with_pool(random: Random, config: SchedulerConfig) -> SchedulerConfig | None:
    if config_conflict(config) is not None:
        return None
    try:
        pool_config_of(config).validate()
    except InvalidArgument:
        return None
    while max_request_tokens(config) < config.max_model_len:
        config = replace(config, num_blocks=config.num_blocks + 1)
    spare = random.choice((0, random.randrange(6), random.randrange(config.num_blocks), 60))
    return replace(config, num_blocks=config.num_blocks + spare)


def _groups(
    random: Random, families: set[str], num_drafts: int, max_model_len: int, *, caching: bool
) -> tuple[KVCacheGroup, ...]:
    size = random.choice((1, 2, 3, 4, 4, 5, 8))
    if "groups" not in families:
        return (KVCacheGroup(AttentionType.FULL, size),)
    choices = list(AttentionType)
    if "tier" in families and num_drafts:  # the tier does not store states after drafts
        choices.remove(AttentionType.STATE_SPACE)
    kinds = [random.choice(choices) for _ in range(random.randint(1, 3))]
    if random.random() < 0.6 or not kinds:
        kinds.insert(random.randint(0, len(kinds)), AttentionType.FULL)
    one_size = AttentionType.CHUNKED_LOCAL in kinds or random.random() < 0.5
    one_size = one_size or "tier" in families
    factors = (1,) if one_size else (1, 1, 2, 3)
    state_factor = random.choice(factors)
    groups = []
    for kind in kinds:
        own = size * random.choice(factors)
        if kind is AttentionType.STATE_SPACE:
            mode = MambaCacheMode.ALIGN if caching else random.choice(tuple(MambaCacheMode))
            aligned = mode is MambaCacheMode.ALIGN
            groups.append(
                KVCacheGroup(
                    kind,
                    size * state_factor if aligned else max_model_len,
                    mamba_cache_mode=mode,
                    num_speculative_blocks=num_drafts,
                )
            )
            continue
        window = 0
        if kind is AttentionType.SLIDING_WINDOW:
            window = random.randint(2, 14)
        if kind is AttentionType.CHUNKED_LOCAL:
            window = own * random.randint(1, 4)
        groups.append(KVCacheGroup(kind, own, window, is_eagle_group=random.random() < 0.2))
    return tuple(groups)


# Events


def _events(random: Random, families: set[str]) -> tuple[Event, ...]:
    events: list[Event] = []

    def add(*incidents: Incident, most: int) -> None:
        for _ in range(random.randint(1, most)):
            events.append(
                Event(
                    random.randrange(LAST_ARRIVAL + 15),
                    random.choice(incidents),
                    random.randrange(6),
                    mid_plan=random.random() < 0.3,
                )
            )

    if "pauses" in families:
        for _ in range(random.randint(1, 3)):
            begin = random.randrange(LAST_ARRIVAL + 10)
            modes = (Incident.PAUSE_KEEP, Incident.PAUSE_WAIT, Incident.PAUSE_WAIT)
            pause = random.choice((*modes, Incident.PAUSE_ABORT))
            end = begin + random.randrange(10)
            events.append(Event(begin, pause, mid_plan=random.random() < 0.3))
            events.append(Event(end, Incident.RESUME, mid_plan=random.random() < 0.4))
    if "resets" in families:
        resets = [Incident.RESET, Incident.RESET_RUNNING]
        add(*resets, *([Incident.RESET_ENCODER_CACHE] if "encoder" in families else []), most=3)
    if "losses" in families:
        add(Incident.LOSE_WORKERS, Incident.LOSE_POOL, Incident.REPORT_LOSS, most=3)
    if "tier" in families and random.random() < 0.7:
        add(Incident.DAMAGE_TIER, most=3)
    add(Incident.BAD_TRANSACTION, most=2)
    return tuple(sorted(events, key=lambda event: event.tick))
