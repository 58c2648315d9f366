"""The tokens that a tenant is charged for a sequence, and the running times of sequences."""

from dataclasses import dataclass

from services.gateway.core.request.inflight import Inflight, ended
from services.gateway.core.routing_decision import RoutingDecision

_SHARE_OF_NEWEST, _SHARE_OF_NEWEST_DEVIATION = 1 / 8, 1 / 4
_DEVIATIONS = 2.0


@dataclass(slots=True)
class ServiceTime:
    """The moving mean of the running times of a tenant's sequences, and the moving mean of their
    deviation, in seconds. Both are computed like round-trip times in Jacobson, "Congestion
    avoidance and control" (SIGCOMM 1988).

    Under overload, many requests are sent to a replica when just enough time for them is left
    before their deadlines. If the mean running time counted as enough, half of these requests would
    miss their deadlines. Therefore `longest_usual` adds two deviations to the mean.
    """

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def longest_usual(self) -> float:
        """A running time in seconds that few sequences exceed, or 0 if no time was measured."""
        return self.mean + _DEVIATIONS * self.deviation

    def add(self, seconds: float) -> None:
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 2
            return
        error = seconds - self.mean
        self.mean += _SHARE_OF_NEWEST * error
        self.deviation += _SHARE_OF_NEWEST_DEVIATION * (abs(error) - self.deviation)


OUTPUT_WEIGHT = 2.0
"""A generated token is charged as this number of prompt tokens (Sheng et al., 2024)."""


@dataclass(frozen=True, slots=True)
class ServiceCharge:
    """The estimated charge for a sequence that is sent to a replica. If the sequence already has
    output, its prompt is not charged again, because a tenant does not pay for recomputation.
    """

    num_prompt_tokens: int
    """Number of charged prompt tokens, which are expected not to be cached."""
    num_output_tokens_before: int
    expected_output_tokens: float
    sent_at: float
    """Time when the sequence was sent, in seconds on the event loop's clock."""

    @property
    def num_tokens(self) -> float:
        return self.num_prompt_tokens + OUTPUT_WEIGHT * self.expected_output_tokens

    def difference(self, num_output_tokens: int) -> float:
        """Returns the correction of the charge when the sequence leaves the replica after
        generating `num_output_tokens` there. It is negative if there were fewer tokens than
        expected.
        """
        return OUTPUT_WEIGHT * (num_output_tokens - self.expected_output_tokens)


def charge_for(
    inflight: Inflight, route: RoutingDecision, mean_output_tokens: float, now: float
) -> ServiceCharge:
    """Returns the charge for a sequence that is sent by `route` at the time `now`, in seconds on
    the event loop's clock. `mean_output_tokens` is the mean length of the tenant's answers.
    """
    request, num_output = inflight.request, len(inflight.output_token_ids)
    num_prompt = 0 if num_output else len(request.prompt_token_ids) - route.num_cached_tokens
    most = (request.sampling.max_tokens or 0) - num_output
    return ServiceCharge(num_prompt, num_output, min(mean_output_tokens, most), now)


def measure(times: ServiceTime, inflight: Inflight, charge: ServiceCharge, now: float) -> None:
    """Adds the running time of a sequence to the tenant's running times, if the sequence had no
    output when it was sent, and either ended at this replica or ran there longer than usual.
    """
    if charge.num_output_tokens_before:
        return
    seconds = now - charge.sent_at
    has_ended = inflight.was_stopped or ended(inflight) is not None
    if has_ended or seconds > times.longest_usual > 0:
        times.add(seconds)
