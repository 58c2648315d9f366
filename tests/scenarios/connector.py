"""The KV connector of a scenario (a scripted run of the scheduler): its settings, and the tokens of
each request that its external storage has.
"""

from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from services.common.pool.ids import RequestKey
from services.scheduler.core.kv_transfer import KVRole
from services.scheduler.core.planning.replica_state import Connect

if TYPE_CHECKING:
    from services.scheduler.options.transfers.core.kv_connector import KVConnector
    from tests.scenarios.stand_in_connector import StandInConnector

HAS_TRANSFERS = find_spec("services.scheduler.options.transfers") is not None
"""Whether the scheduler's option `transfers` is installed. Tests also run without it."""


def connected(connector: "KVConnector | None") -> Connect | None:
    """The argument `connect` of Scheduler, which creates KVTransfers. None without a connector."""
    if connector is None:
        return None
    from services.scheduler.options.transfers.core.kv_transfers import (  # noqa: PLC0415
        KVTransfers,
    )

    return partial(KVTransfers, connector)


@dataclass(frozen=True, slots=True)
class ExternalTokens:
    """A request's tokens in the connector's external storage, and how loads of them behave."""

    num_tokens: int
    is_async: bool = False
    num_steps: int = 1
    """The duration of an asynchronous load, in steps."""
    num_undecided: int = 0
    """For how many first queries of its tokens the connector returns None (not known yet)."""
    max_loads: int | None = None
    """The number of loads after which the storage has lost the tokens. None means no limit."""
    failing_blocks: tuple[int, ...] = ()
    """Blocks that a failing load reports as not loaded, as indices into the load's blocks."""
    fails_whole: bool = False
    """Whether a failing load reports no block IDs, so that all its blocks count as not loaded."""
    num_failing_loads: int = 1
    """The number of loads that fail. They are the first ones."""


@dataclass(slots=True)
class ConnectorScript:
    """The settings of a scenario from which each run builds its StandInConnector."""

    frees_are_awaited: bool
    sources: dict[RequestKey, ExternalTokens] = field(default_factory=dict)
    send_steps: dict[RequestKey, int] = field(default_factory=dict)

    def make(self, block_size: int) -> "StandInConnector":
        """Builds a new connector. Skips the test if the option `transfers` is not installed."""
        if not HAS_TRANSFERS:
            pytest.skip("the scheduler has no transfers")
        from tests.scenarios.stand_in_connector import StandInConnector  # noqa: PLC0415

        return StandInConnector(block_size, self.sources, self.send_steps, self.frees_are_awaited)

    def read_request(self, add: dict[str, Any], key: RequestKey) -> None:
        """Reads the externally stored tokens of an added request, and for how many steps its blocks
        are sent after its end.
        """
        if "external" in add:
            self.sources[key] = _external(add["external"])
        if "send" in add:
            self.send_steps[key] = add["send"]


def read_connector(connector: dict[str, Any]) -> tuple[dict[str, Any], ConnectorScript]:
    """The scheduler settings that a scenario's connector implies, and the connector's script."""
    settings = {
        "kv_role": connector.get("role", KVRole.BOTH.value),
        "kv_load_failure_policy": connector.get("load_failure_policy", "recompute"),
        "supports_divergent_local_hybrid_hits": connector.get("divergent_hits", False),
        "requires_kv_delivery": connector.get("requires_kv_delivery", False),
    }
    return settings, ConnectorScript(connector.get("pending_block_frees", False))


def _external(external: dict[str, Any]) -> ExternalTokens:
    return ExternalTokens(
        num_tokens=external["tokens"],
        is_async=external.get("async", False),
        num_steps=external.get("delay", 1),
        num_undecided=external.get("undecided", 0),
        max_loads=external.get("times"),
        failing_blocks=tuple(external.get("fail_blocks", ())),
        fails_whole=external.get("fail_recving", False),
        num_failing_loads=external.get("fail_times", 1),
    )
