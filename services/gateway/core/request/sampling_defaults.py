"""The server's defaults for sampling parameters."""

from dataclasses import dataclass, field, replace

from services.common.request.sampling import SamplingParams
from services.gateway.core.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A server's defaults, read from a generation_config.json."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """Maximum number of tokens of an answer if neither the client nor the API's definition sets a
    maximum. None means as many tokens as fit into the context.
    """
    most_tokens: int | None = None
    """Upper bound on the number of tokens of every answer, even if the client requests more. None
    means no bound.
    """

    def bounded(self, request: ClientRequest) -> ClientRequest:
        """Returns the request with its limits on tokens set or reduced by `max_tokens` and
        `most_tokens`.
        """
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
