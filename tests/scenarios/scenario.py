"""Scenarios: a scheduler configuration with vLLM's names, and the events of each step."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from services.cli.replay.fields import Field
from services.cli.replay.settings import read_config
from services.common.pool.ids import RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.replica.pause_mode import PauseMode
from services.common.request.encoder_input import EncoderInput
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.request import Request
from tests.scenarios.connector import ConnectorScript, read_connector
from tests.scenarios.stand_in_grammar import COMPILE_ERROR, StandInGrammar

if TYPE_CHECKING:
    from tests.scenarios.stand_in_connector import StandInConnector

DEFAULTS: dict[str, Any] = {
    "policy": "fcfs",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "block_size": 16,
    "num_gpu_blocks": 1000,
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "async_scheduling": False,
    "num_speculative_tokens": 0,
    "max_num_scheduled_tokens": None,
    "max_num_active_seqs": None,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
    "pipeline_parallel_size": 1,
    "num_lookahead_tokens": None,
    "prefix_caching_hash_algo": "sha256",
    "eos_token_id": 2,
    "pooling": False,
    "max_loras": None,
    "kv_connector": None,
    "encoder_compute_budget": 0,
    "encoder_cache_size": 0,
    "disable_chunked_mm_input": False,
    "kv_cache_groups": None,
    "prefix_match_unit": None,
    "prefix_cache_retention_interval": None,
    "drop_last_hit_block": False,
}
_OTHER_SETTINGS = (
    "kv_cache_groups",
    "kv_connector",
    "num_gpu_blocks",
    "prefix_caching_hash_algo",
    "eos_token_id",
)
_MAX_STEPS = 20_000
_GROUPS = {
    "full": AttentionType.FULL,
    "sliding": AttentionType.SLIDING_WINDOW,
    "chunked": AttentionType.CHUNKED_LOCAL,
    "mamba": AttentionType.STATE_SPACE,
}


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a request before a step or, if mid-step, between the step's plan and its output."""

    request_id: str
    is_mid_step: bool


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Further input of a session, which is a request that receives its input in turns. The input
    None ends the session.
    """

    request_id: str
    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class ResetEncoderCache: ...


@dataclass(frozen=True, slots=True)
class Pause:
    """Pauses the scheduler. `clears`: the prefix cache is reset when the pause has completed."""

    mode: PauseMode
    clears: bool


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Resets the prefix cache. With `preempts`, running requests are preempted first."""

    preempts: bool


class Signal(Enum):
    """Events without a parameter."""

    RESUME = "resume"
    THROTTLE = "throttle"
    """During the planning of this step the scheduler limits prefills (`throttle`)."""


Event = Request | NextChunk | Abort | ResetEncoderCache | Pause | ResetPrefixCache | Signal
"""An event before a step. Signal.THROTTLE and mid-step aborts occur within the step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The input of a run. `num_blocks` of the configuration includes the null block."""

    name: str
    named_config: dict[str, Any]
    """The whole configuration, as in the scenario's document."""
    config: SchedulerConfig
    grammars: dict[str, StandInGrammar]
    """Maps request ids to grammars."""
    events: dict[int, list[Event]]
    """Maps step numbers to events, in the order of the document."""
    max_steps: int
    connector: ConnectorScript | None = None

    def make_connector(self) -> "StandInConnector | None":
        """Creates the KV connector of one run. None if the scenario has no connector."""
        if self.connector is None:
            return None
        return self.connector.make(self.config.block_size)


def read_scenario(document: dict[str, Any]) -> Scenario:
    """Reads a scenario from its JSON document."""
    named = {**DEFAULTS, **document["config"]}
    settings: dict[str, Any] = {}
    connector = None
    if named["kv_connector"] is not None:
        settings, connector = read_connector(named["kv_connector"])
    config = _config(named, settings)
    events: dict[int, list[Event]] = defaultdict(list)
    grammars: dict[str, StandInGrammar] = {}
    known: set[str] = set()
    for event in document["events"]:
        step, here = event["step"], events[event["step"]]
        if "add" in event:
            add, key = event["add"], RequestKey(len(known) + 1)
            request = _request(add, key, step, named["eos_token_id"], pooling=config.pooling)
            if connector is not None:
                connector.read_request(add, key)
            if request.request_id in known:
                here.append(_next_chunk(request))
                continue
            known.add(request.request_id)
            here.append(request)
            if "grammar" in add:
                grammar = StandInGrammar(named["eos_token_id"], **{"ready": step} | add["grammar"])
                _set_grammar(request, grammar, step)
                grammars[request.request_id] = grammar
        elif "abort" in event:
            ids = [event["abort"]] if isinstance(event["abort"], str) else event["abort"]
            here += [Abort(request_id, event.get("phase") == "mid") for request_id in ids]
        else:
            here.append(_control(event))
    max_steps = document.get("max_steps", _MAX_STEPS)
    name = document.get("name", "")
    return Scenario(name, named, config, grammars, events, max_steps, connector)


def _config(named: dict[str, Any], connector_settings: dict[str, Any]) -> SchedulerConfig:
    values = {name: value for name, value in named.items() if name not in _OTHER_SETTINGS}
    values |= connector_settings
    values["num_blocks"] = named["num_gpu_blocks"]
    values["num_lookahead_tokens"] = named["num_lookahead_tokens"] or 0
    config = read_config(Field(values))
    groups = tuple(_group(group, config.block_size) for group in named["kv_cache_groups"] or ())
    return replace(config, groups=groups)


def _group(group: dict[str, Any], block_size: int) -> KVCacheGroup:
    return KVCacheGroup(
        _GROUPS[group["type"]],
        group.get("block_size", block_size),
        group.get("window", group.get("chunk", 0)),
        is_eagle_group=group.get("eagle", False),
        mamba_cache_mode=MambaCacheMode(group.get("mode", "none")),
        num_speculative_blocks=group.get("speculative_blocks", 0),
    )


def _request(
    add: dict[str, Any], key: RequestKey, step: int, eos: int, *, pooling: bool
) -> Request:
    """Reads an added request. `min_tokens` is ignored, because only the sampler uses it."""
    prompt = add["prompt_token_ids"]
    adapter = f"lora{add['lora']}" if "lora" in add else ""
    return Request(
        request_id=add["request_id"],
        key=key,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(
            max_tokens=None if pooling else add["max_tokens"],
            eos_token_ids=() if add.get("ignore_eos") else (eos,),
            stop_token_ids=tuple(set(add.get("stop_token_ids", ()))),
        ),
        priority=add.get("priority", 0),
        arrival_time=float(add.get("arrival_time", step)),
        cache_salt=add.get("cache_salt") or "",
        resumable=add.get("resumable", False),
        reads_prefix_cache=not add.get("skip_reading_prefix_cache"),
        # A scenario has no adapter weights, so the digest is computed from the adapter's name.
        adapter_digest=hashlib.sha256(adapter.encode()).digest() if adapter else b"",
        adapter_name=adapter,
        encoder_inputs=tuple(map(_item, add.get("mm", ()))),
    )


def _item(item: dict[str, Any]) -> EncoderInput:
    embeds = item.get("embeds")
    positions = None if embeds is None else tuple(embeds)
    return EncoderInput(item["hash"], item["offset"], item["length"], positions)


def _set_grammar(request: Request, grammar: StandInGrammar, step: int) -> None:
    """Sets the grammar status of a request that arrives before `step`: compiling, ready, failed."""
    request.grammar = GrammarStatus.COMPILING
    if grammar.ready <= step:
        request.grammar = GrammarStatus.READY
        if grammar.error:
            request.grammar, request.error = GrammarStatus.FAILED, COMPILE_ERROR


def _next_chunk(added: Request) -> NextChunk:
    """Converts an added request with the id of an existing session to further input of it."""
    if not added.resumable:
        return NextChunk(added.request_id, None)
    chunk = InputChunk(tuple(added.token_ids), added.sampling, added.arrival_time)
    return NextChunk(added.request_id, chunk)


def _control(event: dict[str, Any]) -> Event:
    """Reads an event without a request: a pause or its end, a reset, a throttled step."""
    if "pause" in event:
        return Pause(PauseMode(event["pause"]), event.get("clear_cache", True))
    if "reset_prefix_cache" in event:
        return ResetPrefixCache(event["reset_prefix_cache"].get("running", False))
    if "reset_encoder_cache" in event:
        return ResetEncoderCache()
    return next(signal for signal in Signal if signal.value in event)
