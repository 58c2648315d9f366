"""Sampling parameters that a server sets where a request does not."""

from dataclasses import dataclass, field, replace

from services.common.request.sampling import SamplingParams
from services.gateway.core.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of a server's requests, as a generation_config.json gives them."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Parameters that a client may leave out, each at its default."""
    max_tokens: int | None = None
    """Length of answers whose client, and whose API, names none; None: as many tokens as fit."""
    most_tokens: int | None = None
    """Most tokens of an answer, also if its client asks for more; None: no bound."""

    def bounded(self, request: ClientRequest) -> ClientRequest:
        """The request with the defaults and bounds of its length."""
        default = request.default_max_tokens
        if default is None:
            default = self.max_tokens
        sampling = request.sampling
        if self.most_tokens is not None:
            default = self.most_tokens if default is None else min(default, self.most_tokens)
            if sampling.max_tokens is not None:
                most = min(sampling.max_tokens, self.most_tokens)
                sampling = replace(sampling, max_tokens=most)
        if sampling is request.sampling and default == request.default_max_tokens:
            return request
        return replace(request, sampling=sampling, default_max_tokens=default)
