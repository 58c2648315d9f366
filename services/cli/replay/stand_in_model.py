"""What a scenario runs in place of a model: tokens and drafts that are functions of the tokens so
far, as in the recorded decisions.
"""

from collections.abc import Iterable

from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request


class StandInModel:
    """The workers of one run: it holds the tokens of each request that was sent to them.

    `num_drafts` are made of each request in a step that samples. With `pooling` prompts are pooled
    instead.
    """

    def __init__(self, num_drafts: int, *, pooling: bool = False) -> None:
        self._num_drafts = num_drafts
        self._pooling = pooling
        self._tokens: dict[Request, list[int]] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The output of a worker that has run all steps before this one."""
        if self._pooling:
            return pooled_output(plan)
        tokens, drafts = [], []
        count = self._num_drafts
        for index, request in enumerate(plan.requests):
            if request in plan.block_tables:
                self._tokens[request] = list(request.token_ids)
            held = self._tokens[request]
            sampled = self._sampled(plan, index, held)
            held += sampled
            tokens.append(sampled)
            drafts.append(proposals(held, count) if count and sampled else [])
        return ModelRunnerOutput(tokens, draft_token_ids=drafts if count else ())

    def take_back(self, requests: Iterable[Request]) -> None:
        """The scheduler did not take the last tokens of these."""
        for request in requests:
            self._tokens[request] = list(request.token_ids)

    def _sampled(self, plan: SchedulerOutput, index: int, held: list[int]) -> list[int]:
        """Accepted drafts and one token more; none when the prompt is not computed to its end."""
        request = plan.requests[index]
        drafts = plan.draft_token_ids.get(request, [])
        end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index] - len(drafts)
        if end < len(held):
            return []
        truth = continuation(held, len(drafts) + 1)
        if -1 in drafts and request not in plan.block_tables:
            drafts = proposals(held, len(drafts))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        return truth[: accepted + 1]


def pooled_output(plan: SchedulerOutput) -> ModelRunnerOutput:
    """The output of a step of a pooling model: no tokens, and no numbers in place of vectors."""
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    ends = (start + count for start, count in zip(starts, counts, strict=True))
    pooled = [
        index
        for index, (request, end) in enumerate(zip(plan.requests, ends, strict=True))
        if end >= request.num_tokens
    ]
    return ModelRunnerOutput([()] * len(plan.requests), pooled=dict.fromkeys(pooled))


def next_token(tokens: list[int]) -> int:
    """The token after `tokens`, in place of a model: a function of the tokens so far."""
    return (sum(tokens[-4:]) * 31 + len(tokens) * 7) % 997 + 3


def continuation(tokens: list[int], count: int) -> list[int]:
    longer = list(tokens)
    for _ in range(count):
        longer.append(next_token(longer))
    return longer[len(tokens) :]


def proposals(tokens: list[int], count: int) -> list[int]:
    """Drafts made when a request holds `tokens`: about seven in ten right, the others one off."""
    return [
        token if (len(tokens) * 7 + index * 13) % 10 < 7 else token + 1
        for index, token in enumerate(continuation(tokens, count))
    ]
