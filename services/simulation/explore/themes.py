"""Themes: what the requests, faults and settings of a run have in common.

With equal frequencies of all kinds in all runs, most coincidences would be rare. In a run with a
theme, a few kinds are frequent and the others are rare, as in swarm testing (Groce et al., 2012).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core.policies import PROGRAM
from services.simulation.explore.faults import Kind
from services.simulation.explore.members import NUM_BLOCKS, NUM_FEW_BLOCKS
from services.simulation.explore.requests import LEAVING

_FEW_BLOCKS, _BLOCKS = {"num_blocks": (NUM_FEW_BLOCKS,)}, {"num_blocks": (NUM_BLOCKS,)}
_MANY = 2, 3, 5
_LONG_PAUSE_SECONDS = 0.06
"""Gateways then pause most of the time, and handle several messages after each pause."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Choices that replace the usual ones. Empty choices replace nothing."""

    foci: tuple[str, ...] = ()
    """The kinds of requests (`requests.FOCI`), one of which is frequent."""
    kinds: tuple[Kind, ...] = ()
    """The kinds of most faults."""
    services: tuple[str, ...] = ()
    """The kinds of services that have faults."""
    num_faults: tuple[int, ...] = ()
    fault_seconds: tuple[float, ...] = ()
    """Limits of the durations of faults."""
    faults_coincide: bool = False
    """Whether all faults begin at the same time, as when a rack loses power."""
    load_seconds: tuple[float, ...] = ()
    pause_seconds: float = 0.0
    """Limit of the pauses of gateways, which alone are busy. 0 if there are none."""
    comes_at_once: bool = False
    prompts: tuple[int, ...] = ()
    """The numbers of tokens of prompts."""
    shape: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Maps fields of Shape to choices."""
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Maps settings of the scheduler to choices. None stands for the default."""


THEMES = {
    "steps fail": Theme(
        foci=("several", LEAVING, LEAVING),
        kinds=(Kind.DEVICE,),
        num_faults=(1, 2),
        comes_at_once=True,
        prompts=(40, 100, 200),
        shape=_BLOCKS,
    ),
    "queues are short": Theme(
        foci=("several", "stop"),
        kinds=(Kind.CRASH,),
        services=("scheduler",),
        num_faults=(0, 1, 2, 3),
        comes_at_once=True,
        settings={"max_num_waiting": (3,), "max_num_active_seqs": (None, None, 2)},
    ),
    "blocks load from the tier": Theme(
        foci=("talk", LEAVING),
        kinds=(Kind.DEVICE, Kind.CRASH),
        num_faults=(0, 0, 1),
        prompts=(40, 100),
        shape=_FEW_BLOCKS | {"tier_gib": (0.003,)},
    ),
    "sessions lose their replica": Theme(
        foci=("turns",),
        kinds=(Kind.CRASH, Kind.STOP, Kind.DEVICE, Kind.TERMINATE),
        services=("pool", "worker", "scheduler"),
        num_faults=_MANY,
        comes_at_once=True,
        shape={"num_blocks": (NUM_FEW_BLOCKS, NUM_BLOCKS)},
    ),
    "clients leave busy gateways": Theme(
        foci=("turns", "plain", LEAVING),
        num_faults=(0,),
        pause_seconds=_LONG_PAUSE_SECONDS,
    ),
    "connections break": Theme(
        kinds=(Kind.RESET,),
        services=("pool", "worker"),
        num_faults=_MANY,
    ),
    "busy gateways lose schedulers": Theme(
        foci=(LEAVING,),
        kinds=(Kind.CRASH,),
        services=("scheduler",),
        num_faults=(2, 3),
        faults_coincide=True,
        pause_seconds=_LONG_PAUSE_SECONDS,
        shape={"num_replicas": (2,)},
    ),
    "clocks are wrong": Theme(kinds=(Kind.AHEAD,), services=("pool",), num_faults=(1, 2)),
    "one direction is cut": Theme(
        kinds=(Kind.CUT_ONE_WAY,),
        services=("gateway", "scheduler"),
        num_faults=_MANY,
        fault_seconds=(40.0,),
    ),
    "replicas lose prompts": Theme(
        foci=("logprobs",),
        kinds=(Kind.CRASH, Kind.RESET, Kind.DEVICE),
        services=("scheduler", "worker"),
        num_faults=_MANY,
        shape=_BLOCKS,
    ),
    "adapters load again": Theme(
        foci=("adapter",),
        kinds=(Kind.CRASH, Kind.RESET),
        services=("worker",),
        num_faults=(0, *_MANY),
    ),
    "schedulers end": Theme(
        foci=("several", "stop", "turns"),
        kinds=(Kind.TERMINATE,),
        services=("scheduler",),
        num_faults=(1, 2, 3),
    ),
    "services hang after a pause": Theme(
        kinds=(Kind.STOP, Kind.DEVICE),
        services=("pool", "worker"),
        num_faults=_MANY,
        load_seconds=(20.0,),
    ),
    "programs share few blocks": Theme(
        foci=("talk", "plain"),
        num_faults=(0, 0, 1),
        prompts=(40, 100),
        comes_at_once=True,
        shape=_FEW_BLOCKS,
        settings={
            "policy": (PROGRAM,),
            "aging_interval": (2, None),
            "retention_headroom": (0.4, None),
        },
    ),
    "prompts share few blocks": Theme(
        foci=("plain", "adapter", "talk", LEAVING),
        num_faults=(0,),
        prompts=(17, 40, 100),
        shape=_FEW_BLOCKS,
    ),
}
