"""Determines which model the gateway serves. Models are compared by fingerprint, and requests are
never sent to replicas with different models.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.ports import TIMER_SLACK_SECONDS, Clock

logger = logging.getLogger(__name__)


class ServedModel:
    """The fingerprint of the current model. Replicas with another fingerprint get no requests.

    The first connected replica sets the fingerprint. It is replaced only when no connected replica
    has it, and either all replicas are connected or `patience_seconds` have passed. A replica that
    left without draining counts as not connected. So after a crash of the last replica with the
    current model, no replica with another model continues its streams. Yet operators can change the
    model of all replicas without restarting the gateway.
    """

    def __init__(
        self,
        tokenizer_fingerprint: bytes,
        patience_seconds: float,
        clock: Clock,
        on_absent: Callable[[], object],
    ) -> None:
        """`tokenizer_fingerprint` is the fingerprint of the gateway's tokenizer, or empty if it is
        not known. `on_absent` is called `patience_seconds` after the last replica with the current
        model left, even if a replica with this model has connected since.
        """
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._patience = patience_seconds
        self._clock = clock
        self._on_absent = on_absent
        self._fingerprint: bytes | None = None
        self._absent_since: float | None = None
        self._is_one_lost = False

    def left(self, replica: Replica) -> None:
        served = replica.description
        was_in_use = served is not None and served.fingerprint == self._fingerprint
        if was_in_use and not replica.is_draining:
            self._is_one_lost = True

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the current model, or empty before a replica has connected."""
        return self._fingerprint or b""

    def compare(self, replicas: Sequence[Replica]) -> bool:
        """Sets the attribute `refusal` of connected replicas. Returns whether the current model was
        replaced.
        """
        connected = {
            replica: replica.description
            for replica in replicas
            if replica.is_connected and replica.description is not None
        }
        usable = [
            description.fingerprint
            for description in connected.values()
            if not self._other_tokenizer(description)
        ]
        was_replaced = False
        if self._fingerprint not in usable:
            all_connected = len(connected) == len(replicas) and not self._is_one_lost
            was_replaced = self._choose(usable, all_connected=all_connected)
        else:
            self._absent_since, self._is_one_lost = None, False
        nodes: dict[str, Replica] = {}
        for replica, description in connected.items():
            first = nodes.setdefault(description.cache_node or replica.address, replica)
            refusal = (
                self._other_tokenizer(description)
                or self._other_model(description)
                or (
                    ""
                    if first is replica
                    else f"the replica is already connected as {first.address}"
                )
            )
            if refusal and refusal != replica.refusal:
                logger.error("scheduler %s gets no requests: %s", replica.address, refusal)
            replica.refusal = refusal
        return was_replaced

    def _choose(self, usable: Sequence[bytes], *, all_connected: bool) -> bool:
        now, before = self._clock.time(), self._fingerprint
        if before is not None and self._absent_since is None:
            self._absent_since = now
            self._clock.call_at(now + self._patience, self._on_absent)
        if not usable:
            return False
        since, patience = self._absent_since, self._patience - TIMER_SLACK_SECONDS
        if since is not None and now < since + patience and not all_connected:
            return False
        [(self._fingerprint, _)] = Counter(usable).most_common(1)
        self._absent_since, self._is_one_lost = None, False
        if before is None:
            return False
        logger.warning(
            "every replica serves another model than before: fingerprint %s in place of %s",
            _short(self._fingerprint),
            _short(before),
        )
        return True

    def _other_model(self, description: ReplicaDescription) -> str:
        if description.fingerprint == self._fingerprint:
            return ""
        return (
            f"its model has the fingerprint {_short(description.fingerprint)}, the model in use"
            f" has {_short(self._fingerprint or b'')}: weights, tokenizer, block size, data type,"
            " draft model or order of sums (AMX) differ"
        )

    def _other_tokenizer(self, description: ReplicaDescription) -> str:
        own, its = self._tokenizer_fingerprint, description.tokenizer_fingerprint
        if not own or not its or own == its:
            return ""
        return (
            f"its worker's tokenizer files ({_short(its)}) differ from this gateway's"
            f" ({_short(own)})"
        )


def _short(fingerprint: bytes) -> str:
    return fingerprint.hex()[:16] or "(none)"
