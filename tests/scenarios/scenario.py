"""A scenario. It consists of a configuration in vLLM's names, and of the events of each step."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from services.cli.replay.fields import Field, FieldError
from services.cli.replay.groups import require_a_pool
from services.cli.replay.settings import read_config
from services.common.pool.ids import RequestKey
from services.common.replica.pause_mode import PauseMode
from services.common.request.encoder_input import EncoderInput
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.request import Request
from tests.scenarios.connector import ConnectorScript, read_connector
from tests.scenarios.groups import read_scenario_groups
from tests.scenarios.stand_in_connector import StandInConnector
from tests.scenarios.stand_in_grammar import COMPILE_ERROR, StandInGrammar

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
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a request, before a step or between a step's plan and its output (`mid`)."""

    request_id: str
    is_mid_step: bool


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Further input of a session. None ends the session."""

    request_id: str
    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class ResetEncoderCache:
    """Clears the encoder cache."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pauses the scheduler. With `clears`, the prefix cache is reset once the pause is complete."""

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
    """The next planned step throttles prefills."""


Event = Request | NextChunk | Abort | ResetEncoderCache | Pause | ResetPrefixCache | Signal
"""An event before or within a step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The input of a run. The configuration's `num_blocks` includes the null block."""

    name: str
    named_config: dict[str, Any]
    """The whole configuration, in the scenario's own names."""
    config: SchedulerConfig
    grammars: dict[str, StandInGrammar]
    """Maps request ids to grammars."""
    events: dict[int, list[Event]]
    """Maps step numbers to events, in the order of the file."""
    max_steps: int
    connector: ConnectorScript | None = None

    def make_connector(self) -> StandInConnector | None:
        """The connector for one run. None if the scenario has no connector."""
        if self.connector is None:
            return None
        return self.connector.make(self.config.block_size)


def read_scenario(document: Any) -> Scenario:
    """Reads a scenario from its JSON document. Raises FieldError."""
    top = Field(document)
    top.only(("name", "seed", "note", "config", "events", "max_steps"))
    given = top.get("config", {})
    given.only(DEFAULTS)
    named = {**DEFAULTS, **given.members()}
    whole = Field(named, given.path)
    connector_settings: dict[str, Any] = {}
    connector = None
    if named["kv_connector"] is not None:
        connector_settings, connector = read_connector(whole["kv_connector"])
    config = _config(whole, connector_settings)
    groups = read_scenario_groups(whole["kv_cache_groups"], config.block_size)
    config = replace(config, groups=groups)
    require_a_pool(config, whole)
    eos = whole["eos_token_id"].integer()
    whole["prefix_caching_hash_algo"].text()
    events: dict[int, list[Event]] = defaultdict(list)
    grammars: dict[str, StandInGrammar] = {}
    is_session: dict[str, bool] = {}
    for event in top["events"].items():
        step = event["step"].integer(0, _MOST_STEPS)
        if "add" in event.members():
            event.only(("step", "add"))
            key = RequestKey(len(is_session) + 1)
            request = _request(event["add"], key, step, eos, pooling=config.pooling)
            if connector is not None:
                connector.read_request(event["add"], key)
            if is_session.get(request.request_id) is False:
                raise event["add"]["request_id"].wrong("must be new")
            if request.request_id in is_session:
                events[step].append(_next_chunk(request))
            else:
                is_session[request.request_id] = request.resumable
                events[step].append(request)
                if "grammar" in event["add"].members():
                    grammar = _grammar(event["add"]["grammar"], step, eos)
                    _set_grammar(request, grammar, step)
                    grammars[request.request_id] = grammar
        elif "reset_encoder_cache" in event.members():
            event.only(("step", "reset_encoder_cache"))
            event["reset_encoder_cache"].boolean()
            events[step].append(ResetEncoderCache())
        elif "abort" in event.members():
            event.only(("step", "abort", "phase"))
            events[step] += _aborts(event)
        else:
            events[step].append(_control(event))
    max_steps = top.get("max_steps", _MAX_STEPS).integer(1, _MOST_STEPS)
    return Scenario(
        top.get("name", "").text(), named, config, grammars, events, max_steps, connector
    )


def _config(field: Field, connector_settings: dict[str, Any]) -> SchedulerConfig:
    named = field.members()
    config = {name: value for name, value in named.items() if name not in _OTHER_SETTINGS}
    config |= connector_settings
    config["num_blocks"] = named["num_gpu_blocks"]
    if config["num_lookahead_tokens"] is None:
        config["num_lookahead_tokens"] = 0
    try:
        return read_config(Field(config, field.path))
    except FieldError as error:
        if error.path[-1] != "num_blocks":
            raise
        wrong = (*error.path[:-1], "num_gpu_blocks")
        complaint = str(error).partition(" ")[2]
        raise FieldError(wrong, complaint) from None


def _request(add: Field, key: RequestKey, step: int, eos: int, *, pooling: bool) -> Request:
    add.only(
        (
            *("request_id", "prompt_token_ids", "max_tokens", "priority", "arrival_time"),
            *("ignore_eos", "stop_token_ids", "min_tokens", "cache_salt", "resumable"),
            *("skip_reading_prefix_cache", "lora", "external", "send", "grammar", "mm"),
        )
    )
    add.get("min_tokens", 0).integer()  # only validated, because min_tokens concerns the sampler
    max_tokens = add["max_tokens"].integer(1)
    salt, prompt = add.get("cache_salt", ""), add["prompt_token_ids"].integers()
    adapter = f"lora{add['lora'].integer(1)}" if "lora" in add.members() else ""
    return Request(
        request_id=add["request_id"].text(),
        key=key,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(
            max_tokens=None if pooling else max_tokens,
            eos_token_ids=() if add.get("ignore_eos", False).boolean() else (eos,),
            stop_token_ids=tuple(set(add.get("stop_token_ids", []).integers())),
        ),
        priority=add.get("priority", 0).integer(-(2**31)),
        arrival_time=add.get("arrival_time", float(step)).number(-1e18, 1e18),
        cache_salt="" if salt.value is None else salt.text(),
        resumable=add.get("resumable", False).boolean(),
        reads_prefix_cache=not add.get("skip_reading_prefix_cache", False).boolean(),
        # A scenario has no adapter weights, so the digest is computed from the name.
        adapter_digest=hashlib.sha256(adapter.encode()).digest() if adapter else b"",
        adapter_name=adapter,
        encoder_inputs=_items(add, len(prompt)),
    )


def _grammar(field: Field, step: int, eos: int) -> StandInGrammar:
    field.only(("ready", "length", "error", "break_at"))
    return StandInGrammar(
        eos,
        ready=field.get("ready", step).integer(0, _MOST_STEPS),
        length=_optional(field, "length"),
        error=field.get("error", False).boolean(),
        break_at=_optional(field, "break_at"),
    )


def _set_grammar(request: Request, grammar: StandInGrammar, step: int) -> None:
    """Sets the grammar status of a request that arrives before `step`: compiling, ready
    or failed.
    """
    request.grammar = GrammarStatus.COMPILING
    if grammar.ready <= step:
        request.grammar = GrammarStatus.READY
        if grammar.error:
            request.grammar, request.error = GrammarStatus.FAILED, COMPILE_ERROR


def _optional(field: Field, name: str) -> int | None:
    number = field.get(name, None)
    return None if number.value is None else number.integer()


def _items(add: Field, num_tokens: int) -> tuple[EncoderInput, ...]:
    items: list[EncoderInput] = []
    for item in add.get("mm", []).items():
        item.only(("hash", "offset", "length", "embeds"))
        offset = item["offset"].integer(items[-1].end if items else 0, num_tokens - 1)
        length = item["length"].integer(1, num_tokens - offset)
        embeds = item.get("embeds", None)
        positions = None if embeds.value is None else tuple(embeds.integers(0, length - 1))
        items.append(EncoderInput(item["hash"].text(), offset, length, positions))
    return tuple(items)


def _next_chunk(added: Request) -> NextChunk:
    """Converts a request that was added with the id of an existing session to the session's next
    input.
    """
    if not added.resumable:
        return NextChunk(added.request_id, None)
    chunk = InputChunk(tuple(added.token_ids), added.sampling, added.arrival_time)
    return NextChunk(added.request_id, chunk)


def _control(event: Field) -> Event:
    """Reads a pause, the end of a pause, a reset, or a throttled step."""
    members = event.members()
    if "pause" in members:
        event.only(("step", "pause", "clear_cache"))
        return Pause(event["pause"].member(PauseMode), event.get("clear_cache", True).boolean())
    if "reset_prefix_cache" in members:
        event.only(("step", "reset_prefix_cache"))
        reset = event["reset_prefix_cache"]
        reset.only(("running",))
        return ResetPrefixCache(reset.get("running", False).boolean())
    for signal in Signal:
        if signal.value in members:
            event.only(("step", signal.value))
            if not event[signal.value].boolean():
                raise event[signal.value].wrong("must be true")
            return signal
    raise event.wrong("must add, abort, pause, resume, reset_prefix_cache or throttle")


def _aborts(event: Field) -> list[Abort]:
    ids = event["abort"]
    is_mid_step = event.get("phase", "before").one_of(("before", "mid")) == "mid"
    items = [ids] if isinstance(ids.value, str) else ids.items()
    return [Abort(item.text(), is_mid_step) for item in items]
