"""What a scenario runs in place of a model: tokens and drafts that are functions of the tokens so
far, as in the recorded decisions.
"""

from collections.abc import Collection, Iterable, Mapping

from services.cli.replay.scenarios.stand_in_grammar import StandInGrammar
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request


class StandInModel:
    """The workers of one run: it holds the tokens of each request that was sent to them.

    `num_drafts` are made of each request in a step that samples. With `pooling` prompts are pooled
    instead. `grammars` are those of requests, by id.
    """

    def __init__(
        self,
        num_drafts: int,
        *,
        pooling: bool = False,
        grammars: Mapping[str, StandInGrammar] | None = None,
    ) -> None:
        self._num_drafts = num_drafts
        self._pooling = pooling
        self._grammars = grammars or {}
        self._tokens: dict[Request, list[int]] = {}
        self._checked: dict[Request, list[int]] = {}
        """Drafts of the next step, as its grammars cut them."""

    def execute(self, plan: SchedulerOutput, void: Collection[Request] = ()) -> ModelRunnerOutput:
        """The output of a worker that has run all steps before this one. The tokens of requests in
        `void` will be dropped, and their drafts follow what they held before.
        """
        if self._pooling:
            return pooled_output(plan)
        tokens: list[list[int]] = []
        drafts: list[list[int]] = []
        refused: dict[int, int] = {}
        for index, request in enumerate(plan.requests):
            if request in plan.block_tables:
                self._tokens[request] = list(request.token_ids)
            held = self._tokens[request]
            sampled = self._sampled(plan, index, held)
            num_allowed = self._num_allowed(request, held, sampled)
            if num_allowed < len(sampled):
                refused[index] = num_allowed
            kept = held if request in void else held + sampled
            drafts.append(self._next_drafts(request, kept) if sampled else [])
            held += sampled
            tokens.append(sampled)
        self._checked = {}
        return ModelRunnerOutput(
            tokens, draft_token_ids=drafts if self._num_drafts else (), refused_tokens=refused
        )

    def check_drafts(self, plan: SchedulerOutput) -> dict[Request, list[int]]:
        """The drafts of the next step, of which the scheduler knows only the number: from the first
        that a grammar refuses on, -1. That of a request that ended meanwhile stays -1.
        """
        self._checked = {
            request: self._checked_drafts(request, placeholders, plan)
            for request, placeholders in plan.draft_token_ids.items()
        }
        return self._checked

    def _checked_drafts(
        self, request: Request, placeholders: list[int], plan: SchedulerOutput
    ) -> list[int]:
        if request.is_finished or request in plan.block_tables:
            return placeholders
        held = self._tokens[request]
        drafts = self._proposals(request, held, len(placeholders))
        num_allowed = self._num_allowed(request, held, drafts)
        return drafts[:num_allowed] + [-1] * (len(drafts) - num_allowed)

    def _next_drafts(self, request: Request, held: list[int]) -> list[int]:
        drafts = self._proposals(request, held, self._num_drafts)
        return drafts[: self._num_allowed(request, held, drafts)]

    def _num_allowed(self, request: Request, held: list[int], following: list[int]) -> int:
        """How many of the tokens that follow those held the grammar of a request allows."""
        grammar = self._grammars.get(request.request_id)
        if grammar is None:
            return len(following)
        return grammar.num_allowed(following, len(held) - request.num_prompt_tokens)

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
        truth = self._continuation(request, held, len(drafts) + 1)
        if request in self._checked:
            drafts = self._checked[request]
        elif -1 in drafts and request not in plan.block_tables:
            drafts = self._proposals(request, held, len(drafts))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        return truth[: accepted + 1]

    def _continuation(self, request: Request, tokens: list[int], count: int) -> list[int]:
        grammar = self._grammars.get(request.request_id)
        if grammar is None:
            return continuation(tokens, count)
        longer = list(tokens)
        for _ in range(count):
            longer.append(
                grammar.sample(next_token(longer), len(longer) - request.num_prompt_tokens)
            )
        return longer[len(tokens) :]

    def _proposals(self, request: Request, tokens: list[int], count: int) -> list[int]:
        """Drafts made when a request holds `tokens`: about seven in ten right, others one off."""
        return [
            token if (len(tokens) * 7 + index * 13) % 10 < 7 else token + 1
            for index, token in enumerate(self._continuation(request, tokens, count))
        ]


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
