"""The connector of a scenario, with its settings and its data about each request."""

from dataclasses import dataclass, field
from typing import Any

from services.common.pool.ids import RequestKey
from services.scheduler.core.kv_transfer import KVRole
from tests.scenarios.stand_in_connector import ExternalTokens, StandInConnector


@dataclass(slots=True)
class ConnectorScript:
    """The settings from which the connector of a run is built."""

    frees_are_awaited: bool
    sources: dict[RequestKey, ExternalTokens] = field(default_factory=dict)
    send_steps: dict[RequestKey, int] = field(default_factory=dict)

    def make(self, block_size: int) -> StandInConnector:
        """Builds a connector in its state before the first step."""
        return StandInConnector(block_size, self.sources, self.send_steps, self.frees_are_awaited)

    def read_request(self, add: dict[str, Any], key: RequestKey) -> None:
        """Reads the externally stored tokens of an added request, and the time to send its blocks,
        in steps.
        """
        if "external" in add:
            self.sources[key] = _external(add["external"])
        if "send" in add:
            self.send_steps[key] = add["send"]


def read_connector(connector: dict[str, Any]) -> tuple[dict[str, Any], ConnectorScript]:
    """The scheduler settings that a connector implies, and the connector's script."""
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
