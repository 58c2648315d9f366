from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import single, value_family, vllm
from services.scheduler.core.output import EngineCoreOutputs


class SpeculationMetrics(Collector):
    """Counts draft tokens. Exports no metrics if the workers propose no drafts. If a request ends,
    later drafts of the step count as rejected even if they were accepted.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_at = [0] * num_speculative_tokens

    def done(self, update: EngineCoreOutputs) -> None:
        """Counts the drafts of a step whose tokens have arrived."""
        self._num_draft_tokens += sum(update.num_draft_tokens)
        for num_accepted in update.num_accepted:
            self._num_drafts += 1
            for position in range(num_accepted):
                self._num_accepted_at[position] += 1

    def collect(self) -> Iterator[Metric]:
        if not self._num_accepted_at:
            return
        yield single(vllm.SPEC_DECODE_DRAFTS, self._num_drafts)
        yield single(vllm.SPEC_DECODE_DRAFT_TOKENS, self._num_draft_tokens)
        yield single(vllm.SPEC_DECODE_ACCEPTED_TOKENS, sum(self._num_accepted_at))
        positions = value_family(vllm.SPEC_DECODE_ACCEPTED_TOKENS_PER_POS)
        for position, num_accepted in enumerate(self._num_accepted_at):
            positions.add_metric([str(position)], num_accepted)
        yield positions
