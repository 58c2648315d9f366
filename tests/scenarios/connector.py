"""The connector of a scenario, with its settings and its data about each request."""

from dataclasses import dataclass, field
from typing import Any

from services.cli.replay.fields import Field
from services.common.pool.ids import RequestKey
from services.scheduler.core.transfers.kv_role import KVLoadFailurePolicy, KVRole
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

    def read_request(self, add: Field, key: RequestKey) -> None:
        """Reads the externally stored tokens of an added request, and how long sending its blocks
        takes.
        """
        members = add.members()
        if "external" in members:
            self.sources[key] = _external(add["external"])
        if "send" in members:
            self.send_steps[key] = add["send"].integer()


def read_connector(connector: Field) -> tuple[dict[str, Any], ConnectorScript]:
    """The scheduler settings that a connector implies, and the connector's script."""
    connector.only(
        (
            *("role", "load_failure_policy", "requires_kv_delivery", "pending_block_frees"),
            "divergent_hits",
        )
    )
    settings = {
        "kv_role": connector.get("role", KVRole.BOTH.value).member(KVRole).value,
        "kv_load_failure_policy": connector.get("load_failure_policy", "recompute")
        .member(KVLoadFailurePolicy)
        .value,
        "supports_divergent_local_hybrid_hits": connector.get("divergent_hits", False).boolean(),
        "requires_kv_delivery": connector.get("requires_kv_delivery", False).boolean(),
    }
    return settings, ConnectorScript(connector.get("pending_block_frees", False).boolean())


def _external(external: Field) -> ExternalTokens:
    external.only(
        (
            *("tokens", "async", "delay", "undecided", "times", "fail_blocks", "fail_recving"),
            "fail_times",
        )
    )
    times = external.get("times", None)
    return ExternalTokens(
        num_tokens=external["tokens"].integer(),
        is_async=external.get("async", False).boolean(),
        num_steps=external.get("delay", 1).integer(),
        num_undecided=external.get("undecided", 0).integer(),
        max_loads=None if times.value is None else times.integer(),
        failing_blocks=tuple(external.get("fail_blocks", []).integers()),
        fails_whole=external.get("fail_recving", False).boolean(),
        num_failing_loads=external.get("fail_times", 1).integer(),
    )
