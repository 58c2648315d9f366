"""Which model the replicas serve, told by their fingerprints: two are never mixed."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from services.gateway.adapters.replica import Replica

logger = logging.getLogger(__name__)


class ServedModel:
    """The fingerprint in use, and which replicas are refused since theirs is another.

    The first replica that connects decides. Another fingerprint is taken when no replica with the
    one in use is connected and either all are connected or `patience_seconds` have passed: a
    crash of the last good replica does not hand its streams' model to one that was set up wrongly,
    and replacing a model on all replicas needs no restart of the gateway.
    """

    def __init__(
        self, tokenizer_fingerprint: bytes, patience_seconds: float, clock: Callable[[], float]
    ) -> None:
        """`tokenizer_fingerprint` is the gateway's own; empty where it is not known."""
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._patience = patience_seconds
        self._clock = clock
        self._fingerprint: bytes | None = None
        self._absent_since: float | None = None

    def compare(self, replicas: Sequence[Replica]) -> bool:
        """Sets the `refusal` of each connected replica; whether the model in use was replaced."""
        connected = [replica for replica in replicas if replica.is_connected]
        usable = [replica for replica in connected if not self._other_tokenizer(replica)]
        was_replaced = False
        if not any(replica.fingerprint == self._fingerprint for replica in usable):
            was_replaced = self._choose(usable, all_connected=len(connected) == len(replicas))
        else:
            self._absent_since = None
        for replica in connected:
            self._refuse(replica)
        return was_replaced

    def seconds_until_replaced(self) -> float | None:
        """When to compare again though no replica changes: a wait for the model in use ends."""
        if self._absent_since is None:
            return None
        return max(0.0, self._absent_since + self._patience - self._clock())

    def _choose(self, usable: Sequence[Replica], *, all_connected: bool) -> bool:
        now, before = self._clock(), self._fingerprint
        if before is not None and self._absent_since is None:
            self._absent_since = now
        if not usable:
            return False
        waited = self._absent_since is not None and now >= self._absent_since + self._patience
        if before is not None and not all_connected and not waited:
            return False
        votes = Counter(replica.fingerprint for replica in usable)
        self._fingerprint = max(votes, key=lambda fingerprint: votes[fingerprint])
        self._absent_since = None
        if before is None:
            return False
        logger.warning(
            "every replica serves another model than before: fingerprint %s in place of %s",
            _short(self._fingerprint),
            _short(before),
        )
        return True

    def _refuse(self, replica: Replica) -> None:
        refusal = self._other_tokenizer(replica)
        if not refusal and replica.fingerprint != self._fingerprint:
            refusal = (
                f"its model has the fingerprint {_short(replica.fingerprint)}, the one in use is"
                f" {_short(self._fingerprint or b'')}: weights, tokenizer, block size or data type"
                " differ"
            )
        if refusal and refusal != replica.refusal:
            logger.error("scheduler %s gets no requests: %s", replica.address, refusal)
        replica.refusal = refusal

    def _other_tokenizer(self, replica: Replica) -> str:
        own, its = self._tokenizer_fingerprint, replica.tokenizer_fingerprint
        if not own or not its or own == its:
            return ""
        return (
            f"its worker's tokenizer files ({_short(its)}) differ from this gateway's"
            f" ({_short(own)})"
        )


def _short(fingerprint: bytes) -> str:
    return fingerprint.hex()[:16] or "(none)"
