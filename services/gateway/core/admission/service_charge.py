"""What the sequences of tenants cost, in tokens."""

from dataclasses import dataclass

from services.gateway.core.inflight import Inflight
from services.gateway.core.route import Route

OUTPUT_WEIGHT = 2.0
"""A generated token counts as so many tokens of a prompt (Sheng et al., 2024)."""


@dataclass(frozen=True, slots=True)
class ServiceCharge:
    """What a sequence is expected to cost from when it is sent to a replica.

    A prompt that is computed again after a loss costs its tenant nothing.
    """

    num_prompt_tokens: int
    """Those that are not expected to be cached."""
    num_output_tokens_before: int
    expected_output_tokens: float
    sent_at: float
    """In seconds, on the event loop's clock."""

    @property
    def num_tokens(self) -> float:
        return self.num_prompt_tokens + OUTPUT_WEIGHT * self.expected_output_tokens

    def difference(self, num_output_tokens: int) -> float:
        """What is still to be charged, or given back, of a sequence that left with so many tokens
        that came.
        """
        return OUTPUT_WEIGHT * (num_output_tokens - self.expected_output_tokens)


def charge_for(
    inflight: Inflight, route: Route, mean_output_tokens: float, now: float
) -> ServiceCharge:
    """The charge of a sequence that is sent now, by a route. `mean_output_tokens` is that of its
    tenant's answers.
    """
    request, num_output = inflight.request, len(inflight.output_token_ids)
    num_prompt = 0 if num_output else len(request.prompt_token_ids) - route.num_cached_tokens
    most = (request.sampling.max_tokens or 0) - num_output
    return ServiceCharge(num_prompt, num_output, min(mean_output_tokens, most), now)
