"""Tracks the load of one replica, from this gateway's sequences and the scheduler's reports."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from services.common.replica.load import ReplicaLoad
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision

INITIAL_MEAN_OUTPUT_TOKENS = 128.0
"""The assumed mean number of output tokens at a replica before any sequence has ended there."""
OWN_TOKENS_COUNT = 2
"""Factor by which the number of a sequence's own uncomputed tokens is multiplied in the sequence's
cost at a replica. It is 2, because both the sequence and the requests behind it wait until these
tokens are computed.
"""
EVICTED_TOKENS_COUNT = 4
"""This number times a replica's eviction pressure is added to OWN_TOKENS_COUNT. The reason: in a
full KV-cache pool, each new block evicts a cached block, which a later request might have hit. The
eviction pressure is the number of tokens recently computed at the replica, divided by the mean of
this number over all replicas (after Preble's eviction cost).

Without this term, most new conversations would be sent to the few replicas that happen to measure
slightly better speeds. In simulations (tests/gateway/simulated_fleet.py), the values of
OWN_TOKENS_COUNT and EVICTED_TOKENS_COUNT had the best hit rates and times to first token.
"""
RECENT_SECONDS = 30.0
"""Half-life of the number of recently computed tokens, in seconds."""
_HALF_LIVES = 256
"""Length of an era, a period with common token weights (see `Era`), in half-lives."""
_SHARE = 0.1
"""Weight of the newest value in moving means."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The seconds by which each prompt token and each decoding request lengthen a step."""

    seconds_per_prompt_token: float
    seconds_per_decode: float

    @property
    def values(self) -> tuple[float, float]:
        return self.seconds_per_prompt_token, self.seconds_per_decode


DEFAULT_SPEEDS = Speeds(1e-4, 1e-4)
"""The speeds assumed before any replica has reported speeds. Only their ratio matters."""


class Era(NamedTuple):
    """A moment: the number of the era that contains it, and the weight of a token computed at it.

    Recently computed tokens are counted with exponential decay: a token counts half after
    RECENT_SECONDS. Instead of reducing all counts as time passes, new tokens get weights that
    double every RECENT_SECONDS (forward decay: Cormode et al., ICDE 2009). Before weights become
    too large, a new era starts, in which weights start at 1 again.
    """

    number: int
    weight: float


def era_of(now_seconds: float) -> Era:
    number, half_lives = divmod(now_seconds / RECENT_SECONDS, _HALF_LIVES)
    return Era(int(number), 2.0**half_lives)


def mean_speeds(known: Sequence[Speeds]) -> Speeds:
    if not known:
        return DEFAULT_SPEEDS
    return Speeds(
        fmean(speeds.seconds_per_prompt_token for speeds in known),
        fmean(speeds.seconds_per_decode for speeds in known),
    )


@dataclass(slots=True)
class _Sent:
    """A sequence that this gateway has sent to the replica, with estimates of its tokens."""

    inflight: Inflight
    num_output_tokens: int
    """Number of output tokens that the sequence already had when it was sent."""
    num_uncomputed_tokens: int
    """Estimated number of tokens that are not computed yet."""
    num_cached_tokens: int
    """Number of tokens that were expected to be cached when the sequence was sent."""
    cached_key: int | None
    """Key of the last block that was expected to be cached when the sequence was sent."""


class LoadTracker:
    """Counts sequences at one replica as soon as they are sent, and corrects the counts with each
    load report of the replica's scheduler.

    The scheduler sends a load report after each step in which requests arrive or end, or prompts
    are computed. If the gateway relied on reports alone, it would send all requests between two
    reports to the same replica.
    """

    def __init__(self) -> None:
        self.trust = 1.0
        """Moving mean of the fraction of tokens that were really cached, among the tokens that were
        expected to be cached when their sequences were sent.
        """
        self.on_changed: Callable[[], object] = lambda: None
        """Called after each change, except a change by `refresh`."""
        self._sent: dict[int, _Sent] = {}
        self._computing: dict[int, _Sent] = {}
        """The admitted sequences without output from this replica."""
        self._num_sharing: Counter[int] = Counter()
        self._num_uncomputed = 0
        self._num_sessions = 0
        self.mean_output_tokens = INITIAL_MEAN_OUTPUT_TOKENS
        self._era = 0
        self.clear()

    def clear(self) -> None:
        """Resets the load and the speeds. Called when the session with the scheduler has ended."""
        self._sent.clear()
        self._computing.clear()
        self._num_sharing.clear()
        self._num_uncomputed = 0
        self._num_sessions = 0
        self._num_other_requests = 0
        self._num_other_tokens = 0
        self.speeds: Speeds | None = None
        """The speeds that the scheduler measured, or None before it has reported any."""
        self._recent_weight = 0.0
        self.on_changed()

    @property
    def num_sessions(self) -> int:
        """Number of clients' sessions (conversations in several requests) of this gateway whose KV
        blocks the replica keeps between two requests. Each of these sessions occupies a slot of a
        running sequence.
        """
        return self._num_sessions

    @num_sessions.setter
    def num_sessions(self, number: int) -> None:
        self._num_sessions = number
        self.on_changed()

    @property
    def num_requests(self) -> int:
        """Number of requests of all gateways at the replica, plus `num_sessions`."""
        return len(self._sent) + self._num_sessions + self._num_other_requests

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of uncomputed tokens of all gateways' requests at the replica."""
        return self._num_uncomputed + self._num_other_tokens

    def num_sharing(self, cached_key: int) -> int:
        """Returns the number of this gateway's sequences at the replica that share the cached
        prefix whose last block has the key `cached_key`.
        """
        return self._num_sharing[cached_key]

    def recent_weight(self, era_number: int) -> float:
        """Returns the number of tokens that the replica has recently prefilled for this gateway's
        sequences, as a sum of weights in the given era (see `Era`).
        """
        if era_number != self._era:
            self._recent_weight *= 2.0 ** (_HALF_LIVES * (self._era - era_number))
            self._era = era_number
        return self._recent_weight

    def refresh(self) -> None:
        """Stops counting the uncomputed tokens of sequences with new output."""
        if not self._computing:
            return
        for handle, sent in list(self._computing.items()):
            if len(sent.inflight.output_token_ids) > sent.num_output_tokens:
                self._num_uncomputed -= sent.num_uncomputed_tokens
                sent.num_uncomputed_tokens = 0
                del self._computing[handle]

    def cost_seconds(
        self, num_tokens: int, max_output_tokens: int | None, fleet_speeds: Speeds, pressure: float
    ) -> float:
        """Returns the cost in seconds if a sequence with `num_tokens` uncomputed tokens is sent to
        this replica. The cost is the sum of three times:

        1. the time to compute the uncomputed tokens that already wait at the replica;
        2. the time to compute the sequence's own tokens, multiplied by OWN_TOKENS_COUNT +
           `pressure` * EVICTED_TOKENS_COUNT (`pressure` is the replica's eviction pressure);
        3. the time by which the sequence and the other requests slow each other down while the
           sequence decodes. The sequence is assumed to generate the mean number of output tokens,
           but at most `max_output_tokens`. None means no limit.

        The cost is computed with the average of the replica's own speeds and `fleet_speeds`, the
        mean speeds of all replicas. With the replica's own speeds alone, most new conversations
        would be sent to the few replicas that happen to measure better speeds at low load.
        """
        num_output_tokens = self.mean_output_tokens
        if max_output_tokens is not None:
            num_output_tokens = min(num_output_tokens, max_output_tokens)
        return cost_seconds(
            self.speeds or fleet_speeds,
            fleet_speeds,
            self.num_uncomputed_tokens,
            num_tokens,
            pressure,
            self.num_requests * num_output_tokens,
        )

    def sent(self, handle: int, inflight: Inflight, route: RoutingDecision) -> None:
        num_output_tokens = len(inflight.output_token_ids)
        num_tokens = len(inflight.request.prompt_token_ids) + num_output_tokens
        num_uncomputed = num_tokens - route.num_cached_tokens
        sent = _Sent(
            inflight, num_output_tokens, num_uncomputed, route.num_cached_tokens, route.cached_key
        )
        self._sent[handle] = sent
        if route.cached_key is not None:
            self._num_sharing[route.cached_key] += 1
        self._num_uncomputed += num_uncomputed
        self.on_changed()

    def admitted(
        self, handle: int, num_cached_tokens: int, block_size: int, now_seconds: float
    ) -> None:
        """Corrects the estimates for a sequence that was scheduled with `num_cached_tokens` cached
        tokens. One block less than expected still counts as a correct expectation, because a fully
        cached prompt's last block is computed again.
        """
        sent = self._sent.get(handle)
        if sent is None:
            return
        num_tokens = len(sent.inflight.request.prompt_token_ids) + sent.num_output_tokens
        era = era_of(now_seconds)
        weight = self.recent_weight(era.number)
        self._recent_weight = weight + era.weight * (num_tokens - num_cached_tokens)
        difference = sent.num_cached_tokens - num_cached_tokens
        if sent.num_uncomputed_tokens:
            sent.num_uncomputed_tokens += difference
            self._num_uncomputed += difference
            self._computing[handle] = sent
        if sent.num_cached_tokens:
            share = min(1.0, (num_cached_tokens + block_size) / sent.num_cached_tokens)
            self.trust += _SHARE * (share - self.trust)
        self.on_changed()

    def ended(self, handle: int) -> None:
        sent = self._sent.pop(handle, None)
        if sent is None:
            return
        self._computing.pop(handle, None)
        self._num_uncomputed -= sent.num_uncomputed_tokens
        if sent.cached_key is not None:
            self._num_sharing[sent.cached_key] -= 1
            if not self._num_sharing[sent.cached_key]:
                del self._num_sharing[sent.cached_key]
        num_output_tokens = len(sent.inflight.output_token_ids)
        if num_output_tokens:
            self.mean_output_tokens += _SHARE * (num_output_tokens - self.mean_output_tokens)
        self.on_changed()

    def reported(self, load: ReplicaLoad) -> None:
        """Applies a load report of the scheduler. If it has more uncomputed tokens than this
        gateway counts, the excess are tokens of other gateways' requests.
        """
        self.refresh()
        self._num_other_requests = load.num_other_requests
        self._num_other_tokens = max(0, load.num_uncomputed_tokens - self._num_uncomputed)
        if load.seconds_per_prompt_token and load.seconds_per_decode:
            self.speeds = Speeds(load.seconds_per_prompt_token, load.seconds_per_decode)
        self.on_changed()


def cost_seconds(
    speeds: Speeds,
    fleet_speeds: Speeds,
    num_waiting_tokens: float,
    num_own_tokens: float,
    pressure: float,
    num_decoded_tokens: float,
) -> float:
    """Computes the cost that `LoadTracker.cost_seconds` describes. If an argument grows, the cost
    does not fall, so lower bounds of the arguments give a lower bound of the cost.
    """
    own_tokens_count = OWN_TOKENS_COUNT + EVICTED_TOKENS_COUNT * pressure
    num_computed = num_waiting_tokens + own_tokens_count * num_own_tokens
    per_prompt_token = speeds.seconds_per_prompt_token + fleet_speeds.seconds_per_prompt_token
    per_decode = speeds.seconds_per_decode + fleet_speeds.seconds_per_decode
    return (per_prompt_token * num_computed + per_decode * num_decoded_tokens) / 2
