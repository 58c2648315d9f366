"""Random worlds: a replica's configuration, arriving requests, and incidents such as losses."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from tests.scheduler.paged_model import continuation

MAX_PROMPT = 24
MAX_OUTPUT = 20
MAX_ARRIVALS = 9
MAX_EVENTS = 3
MAX_UNUSED = 8
"""The budget of a step is at most this number of tokens less than the workers' limit."""

T = TypeVar("T")


class Choices:
    """Choices decoded from bytes, one byte each. If no bytes are left, every choice is the first
    option.

    Hypothesis draws a whole world as a few byte strings, which is much faster than one draw for
    each choice. It shrinks bytes towards zeros, which decode to the simplest world.
    """

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, count: int) -> int:
        """A number from 0 to `count - 1`. `count` is at most 256."""
        return next(self._data, 0) % count

    def among(self, *options: T) -> T:
        """One of the options. A zero byte selects the first one."""
        return options[self.below(len(options))]

    def one_in(self, count: int) -> bool:
        return self.below(count) == count - 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives before a step. It may be aborted at step `abort_at`: before the step
    is planned or, with `abort_mid_step`, between the step's plan and its output.
    """

    step: int
    token_ids: list[int]
    num_output: int
    """How many of the last tokens are output that the client already has."""
    max_tokens: int
    ending_token_ids: frozenset[int]
    priority: int
    salt: str
    reads_prefix_cache: bool
    abort_at: int | None
    abort_mid_step: bool

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output


class Incident(enum.Enum):
    PREEMPT = enum.auto()
    """All running requests are preempted."""
    RESET = enum.auto()
    """All running requests are preempted, and the prefix cache is reset."""
    REFUSED_RESET = enum.auto()
    """A reset of the prefix cache, which is refused if requests run."""
    PAUSE = enum.auto()
    """Nothing is planned for some steps."""
    PAUSE_AND_ABORT = enum.auto()
    """All requests are aborted, and nothing is planned for some steps."""
    LOSS = enum.auto()
    """The pool and the workers are lost between two steps."""
    LOSS_MID_STEP = enum.auto()
    """The pool is lost after some transactions, possibly within a step."""


@dataclass(frozen=True, slots=True)
class Event:
    """An incident before a step. `count`: steps of a pause, or transactions before a loss."""

    step: int
    incident: Incident
    count: int


@dataclass(frozen=True, slots=True)
class World:
    config: dict[str, Any]
    arrivals: list[Arrival]
    events: list[Event]

    @property
    def last_step(self) -> int:
        """The last step before which a request arrives or an incident occurs."""
        return max(item.step for item in (*self.arrivals, *self.events))


def worlds(**config: Any) -> st.SearchStrategy[World]:
    """Random worlds. `config` sets values of their configurations."""
    return st.tuples(
        st.binary(min_size=40, max_size=40),
        st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=MAX_ARRIVALS),
        st.binary(min_size=3 * MAX_EVENTS, max_size=3 * MAX_EVENTS),
    ).map(lambda drawn: _world(config, *drawn))


def _world(fixed: dict[str, Any], config: bytes, arrivals: Sequence[bytes], events: bytes) -> World:
    return World(
        config=_config(Choices(config)) | fixed,
        arrivals=[_arrival(Choices(data)) for data in arrivals],
        events=_events(Choices(events)),
    )


def _config(choices: Choices) -> dict[str, Any]:
    """A configuration. The pool fits the longest sequence, and not much more than two such
    sequences. The budget of a step fits a token with its drafts, without chunked prefill a whole
    sequence, and with state-space layers a block.
    """
    num_drafts = choices.among(0, 0, 0, 1, 2, 3)
    max_model_len = MAX_PROMPT + 4 + choices.below(MAX_OUTPUT - 4)
    block_size = 1 + choices.below(8)
    chunked = not choices.one_in(5)
    num_lookahead_tokens = choices.among(0, 0, num_drafts, 1)
    groups = _groups(choices, block_size)
    kinds = {group.attention_type for group in groups}
    least = 1 + num_drafts
    if AttentionType.STATE_SPACE in kinds:
        num_drafts = num_lookahead_tokens = 0
        least, chunked = block_size, True
    budget = least + choices.below(choices.among(40, 4))
    if not chunked:
        budget = max_model_len + num_drafts
    in_flight = max(2 * (budget + MAX_UNUSED), 1 + 2 * num_drafts) + num_lookahead_tokens
    whole = sum(group.max_held_blocks(max_model_len, in_flight, 2) for group in groups)
    max_num_seqs = 1 + choices.below(6)
    return {
        "groups": groups,
        "drop_last_hit_block": choices.one_in(4) and AttentionType.CHUNKED_LOCAL not in kinds,
        "num_speculative_tokens": num_drafts,
        "num_lookahead_tokens": num_lookahead_tokens,
        "num_speculative_rows": choices.among(0, 1 + choices.below(12)) if num_drafts else 0,
        "block_size": block_size,
        "num_blocks": 1 + whole + choices.among(0, choices.below(whole + 1)),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_active_seqs": choices.among(None, None, 1 + choices.below(max_num_seqs)),
        "max_num_batched_tokens": budget + choices.among(0, MAX_UNUSED),
        "max_num_scheduled_tokens": budget,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": not choices.one_in(4),
        "long_prefill_token_threshold": choices.among(0, 0, 1, 5),
        "long_prefill_token_threshold_adaptive": choices.one_in(2),
        "scheduler_reserve_full_isl": not choices.one_in(2),
        "watermark": choices.among(0.0, 0.0, 0.1, 0.5),
    }


def _groups(choices: Choices, block_size: int) -> tuple[KVCacheGroup, ...]:
    """KV-cache groups: in half of the worlds one group of full attention, else up to three groups
    of any attention type.
    """
    if not choices.one_in(2):
        return (KVCacheGroup(AttentionType.FULL, block_size),)
    groups = []
    for _ in range(1 + choices.below(3)):
        kind = choices.among(*AttentionType)
        window = {
            AttentionType.SLIDING_WINDOW: 2 + choices.below(12),
            AttentionType.CHUNKED_LOCAL: block_size * (1 + choices.below(3)),
        }
        group = KVCacheGroup(kind, block_size, window.get(kind, 0))
        if kind is AttentionType.STATE_SPACE:
            group = replace(group, mamba_cache_mode=MambaCacheMode.ALIGN)
        groups.append(group)
    return tuple(groups)


def _arrival(choices: Choices) -> Arrival:
    """A request. Prompts have few different beginnings, so that many share prefixes. Some contain a
    shorter prompt and its answer, like a second turn of a conversation.
    """
    stem, own = choices.among(100, 500), 3 + choices.below(2)
    prompt = [*range(stem, stem + choices.among(0, 4, 9, 14)), *[own] * (1 + choices.below(2))]
    prompt += continuation(prompt, choices.among(0, 0, 0, choices.below(9)))
    num_output = choices.among(0, 0, 0, 2)
    max_tokens = num_output + 1 + choices.below(MAX_OUTPUT - 2)
    answer = continuation(prompt, max_tokens)
    ends_early = choices.one_in(4)
    ending = answer[num_output + choices.below(max_tokens - num_output)]
    step = choices.below(10)
    is_given_up = choices.one_in(3)
    return Arrival(
        step=step,
        token_ids=prompt + answer[:num_output],
        num_output=num_output,
        max_tokens=max_tokens,
        ending_token_ids=frozenset({ending} if ends_early else ()),
        priority=choices.below(3),
        salt=choices.among("", "", "salt"),
        reads_prefix_cache=not choices.one_in(10),
        abort_at=step + choices.below(20) if is_given_up else None,
        abort_mid_step=choices.one_in(2),
    )


def _events(choices: Choices) -> list[Event]:
    events: dict[int, Event] = {}
    for _ in range(MAX_EVENTS):
        incident = choices.among(None, None, *Incident)
        step, count = 1 + choices.below(20), choices.below(4)
        if incident is not None:
            events[step] = Event(step, incident, count)
    return list(events.values())
