"""The load of one replica: what this gateway sent there, and what the scheduler reports."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from services.common.replica.load import ReplicaLoad
from services.gateway.core.fleet.route import Route
from services.gateway.core.request.inflight import Inflight

INITIAL_MEAN_OUTPUT_TOKENS = 128.0
"""The mean length of outputs at a replica before the first one ends."""
OWN_TOKENS_COUNT = 2
"""How often the tokens count that a sequence has to compute: it waits for them, and so do the
requests behind it.
"""
EVICTED_TOKENS_COUNT = 4
"""How often they count, beyond that, at a replica under the mean pressure: in a full pool their
blocks take the place of as many that others would have found, the more so the more is computed
there (Preble's cost of evictions). Without the pressure, small differences between the speeds that
replicas measure bring most new conversations to the same pools. In simulated time
(tests/gateway/simulated_fleet.py) these two numbers give the best hit rates and times to the first
token together.
"""
RECENT_SECONDS = 30.0
"""Half-life of the count of tokens that were computed at a replica."""
REFRESH_SECONDS = 0.05
"""`LoadTracker.refresh` does nothing if it was called less than this before."""
_SHARE = 0.1
"""Weight of the newest value in the means."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """By how much each token of a prompt, and each request that decodes, makes a step longer."""

    seconds_per_prompt_token: float
    seconds_per_decode: float


DEFAULT_SPEEDS = Speeds(1e-4, 1e-4)
"""Used while no replica has measured its own: only their ratio matters then."""


def mean_speeds(loads: Iterable["LoadTracker"]) -> Speeds:
    """The mean of what is known of several replicas; the default where nothing is."""
    known = [load.speeds for load in loads if load.speeds is not None]
    if not known:
        return DEFAULT_SPEEDS
    return Speeds(
        fmean(speeds.seconds_per_prompt_token for speeds in known),
        fmean(speeds.seconds_per_decode for speeds in known),
    )


@dataclass(slots=True)
class _Sent:
    """A sequence that this gateway sent."""

    inflight: Inflight
    num_output_tokens: int
    """Output that it had then."""
    num_uncomputed_tokens: int
    """Tokens that are not computed yet, as far as is known."""
    num_cached_tokens: int
    """Tokens that were expected to be cached."""
    cached_key: int | None
    """See Route."""


class LoadTracker:
    """Counts what is sent at once, and corrects itself by each report.

    Reports come with each step in which requests come or end, or prompts are computed. A gateway
    that counted by them alone would send all requests of a step to the same replica.
    """

    def __init__(self) -> None:
        self.trust = 1.0
        """Mean of the share of the tokens expected to be cached there that were."""
        self._sent: dict[int, _Sent] = {}
        self._num_sharing: Counter[int] = Counter()
        self._num_uncomputed = 0
        self.num_sessions = 0
        """Sessions of this gateway that are kept there between two turns, each in a place."""
        self._refreshed_at = -REFRESH_SECONDS
        self._mean_output_tokens = INITIAL_MEAN_OUTPUT_TOKENS
        self.clear()

    def clear(self) -> None:
        """Forgets what runs there, and how fast, since the session ended."""
        self._sent.clear()
        self._num_sharing.clear()
        self._num_uncomputed = 0
        self.num_sessions = 0
        self._num_other_requests = 0
        self._num_other_tokens = 0
        self.speeds: Speeds | None = None
        """As the scheduler measured them; None until it has."""
        self.recent_tokens = 0.0
        """Tokens of this gateway's prompts that were computed there lately."""

    @property
    def num_requests(self) -> int:
        """Requests of all gateways there, and sessions between two turns."""
        return len(self._sent) + self.num_sessions + self._num_other_requests

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of all gateways' requests that are to be computed there."""
        return self._num_uncomputed + self._num_other_tokens

    def num_sharing(self, cached_key: int) -> int:
        """Sequences of this gateway there whose last block that was expected to be cached has this
        key: all of them begin alike, up to there.
        """
        return self._num_sharing[cached_key]

    def refresh(self, now_seconds: float) -> None:
        """Leaves out the prompts of sequences that got tokens, and forgets a part of the recent
        tokens, unless it did so just before.
        """
        if now_seconds < self._refreshed_at + REFRESH_SECONDS:
            return
        self.recent_tokens *= 0.5 ** ((now_seconds - self._refreshed_at) / RECENT_SECONDS)
        self._refreshed_at = now_seconds
        for sent in self._sent.values():
            if len(sent.inflight.output_token_ids) > sent.num_output_tokens:
                self._num_uncomputed -= sent.num_uncomputed_tokens
                sent.num_uncomputed_tokens = 0

    def cost_seconds(
        self,
        num_tokens: int,
        max_output_tokens: int | None,
        fleet_speeds: Speeds,
        pressure: float,
    ) -> float:
        """The cost of a sequence here of which `num_tokens` are to be computed: the time that it
        waits for the tokens before it, several times its own, and the time by which the requests
        here and the sequence slow one another down while it decodes. `fleet_speeds` are the means
        of all replicas: this one counts as half as far from them as it measured, since what equal
        replicas measure at little load differs by chance, and most new conversations would come to
        the same pools. `pressure` is that of evictions here, divided by the mean of all replicas.
        """
        speeds = self.speeds or fleet_speeds
        num_output_tokens = self._mean_output_tokens
        if max_output_tokens is not None:
            num_output_tokens = min(num_output_tokens, max_output_tokens)
        own_tokens_count = OWN_TOKENS_COUNT + EVICTED_TOKENS_COUNT * pressure
        num_computed = self.num_uncomputed_tokens + own_tokens_count * num_tokens
        num_decoded = self.num_requests * num_output_tokens
        per_prompt_token = speeds.seconds_per_prompt_token + fleet_speeds.seconds_per_prompt_token
        per_decode = speeds.seconds_per_decode + fleet_speeds.seconds_per_decode
        return (per_prompt_token * num_computed + per_decode * num_decoded) / 2

    def sent(self, handle: int, inflight: Inflight, route: Route) -> None:
        """A sequence was sent."""
        num_output_tokens = len(inflight.output_token_ids)
        num_tokens = len(inflight.request.prompt_token_ids) + num_output_tokens
        num_uncomputed = num_tokens - route.num_cached_tokens
        self._sent[handle] = _Sent(
            inflight,
            num_output_tokens,
            num_uncomputed,
            route.num_cached_tokens,
            route.cached_key,
        )
        if route.cached_key is not None:
            self._num_sharing[route.cached_key] += 1
        self._num_uncomputed += num_uncomputed

    def admitted(self, handle: int, num_cached_tokens: int, block_size: int) -> None:
        """A sequence was scheduled, of which `num_cached_tokens` were cached. If a prompt is
        wholly cached, its last block is computed again.
        """
        sent = self._sent.get(handle)
        if sent is None:
            return
        num_tokens = len(sent.inflight.request.prompt_token_ids) + sent.num_output_tokens
        self.recent_tokens += num_tokens - num_cached_tokens
        difference = sent.num_cached_tokens - num_cached_tokens
        if sent.num_uncomputed_tokens:
            sent.num_uncomputed_tokens += difference
            self._num_uncomputed += difference
        if sent.num_cached_tokens:
            share = min(1.0, (num_cached_tokens + block_size) / sent.num_cached_tokens)
            self.trust += _SHARE * (share - self.trust)

    def ended(self, handle: int) -> None:
        """A sequence ended, or was aborted or refused."""
        sent = self._sent.pop(handle, None)
        if sent is None:
            return
        self._num_uncomputed -= sent.num_uncomputed_tokens
        if sent.cached_key is not None:
            self._num_sharing -= Counter((sent.cached_key,))
        num_output_tokens = len(sent.inflight.output_token_ids)
        if num_output_tokens:
            self._mean_output_tokens += _SHARE * (num_output_tokens - self._mean_output_tokens)

    def reported(self, load: ReplicaLoad) -> None:
        """The scheduler reported its load. Tokens that are not this gateway's are others'."""
        self._num_other_requests = load.num_other_requests
        self._num_other_tokens = max(0, load.num_uncomputed_tokens - self._num_uncomputed)
        if load.seconds_per_prompt_token and load.seconds_per_decode:
            self.speeds = Speeds(load.seconds_per_prompt_token, load.seconds_per_decode)
