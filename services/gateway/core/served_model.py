"""Which model the replicas serve, by their fingerprints: two are never mixed."""

import logging
from collections import Counter
from collections.abc import Sequence

from services.gateway.core.ports import Clock
from services.gateway.core.replica import Replica, ReplicaDescription

logger = logging.getLogger(__name__)


class ServedModel:
    """The fingerprint in use; replicas with another one are refused.

    The first replica that connects decides. Another fingerprint is taken when no replica with the
    one in use is connected and either all are connected or `patience_seconds` have passed: a
    crash of the last good replica does not hand its streams' model to one that was set up wrongly,
    and replacing a model on all replicas needs no restart of the gateway.
    """

    def __init__(self, tokenizer_fingerprint: bytes, patience_seconds: float, clock: Clock) -> None:
        """`tokenizer_fingerprint` is the gateway's own; empty where it is not known."""
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._patience = patience_seconds
        self._clock = clock
        self._fingerprint: bytes | None = None
        self._absent_since: float | None = None

    def compare(self, replicas: Sequence[Replica]) -> bool:
        """Sets the `refusal` of each connected replica; whether the model in use was replaced."""
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
            was_replaced = self._choose(usable, all_connected=len(connected) == len(replicas))
        else:
            self._absent_since = None
        for replica, description in connected.items():
            refusal = self._other_tokenizer(description) or self._other_model(description)
            if refusal and refusal != replica.refusal:
                logger.error("scheduler %s gets no requests: %s", replica.address, refusal)
            replica.refusal = refusal
        return was_replaced

    def compare_again_at(self) -> float | None:
        """When to compare again though no replica changes: a wait for the model in use ends."""
        return None if self._absent_since is None else self._absent_since + self._patience

    def _choose(self, usable: Sequence[bytes], *, all_connected: bool) -> bool:
        now, before = self._clock.time(), self._fingerprint
        if before is not None and self._absent_since is None:
            self._absent_since = now
        if not usable:
            return False
        waited = self._absent_since is not None and now >= self._absent_since + self._patience
        if before is not None and not all_connected and not waited:
            return False
        [(self._fingerprint, _)] = Counter(usable).most_common(1)
        self._absent_since = None
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
            f"its model has the fingerprint {_short(description.fingerprint)}, the one in use is"
            f" {_short(self._fingerprint or b'')}: weights, tokenizer, block size or data type"
            " differ"
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
