"""A simulated model for scenarios (scripted runs of the scheduler). As in the recordings of vLLM,
the sampled tokens and the drafts are functions of the previous tokens.
"""

from collections.abc import Collection, Iterable, Mapping

from services.cli.replay.what_if import pooled_output
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from tests.scenarios.stand_in_grammar import StandInGrammar


class StandInModel:
    """The simulated workers of one run. They store the tokens of each request.

    `num_drafts` is the number of draft tokens that a step proposes for each request that it
    samples. With `pooling`, prompts are pooled and no tokens are sampled. `grammars` maps request
    ids to grammars.
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
        """Each request's drafts for the next step, as its grammar allows. Refused ones are -1."""

    def execute(self, plan: SchedulerOutput, void: Collection[Request] = ()) -> ModelRunnerOutput:
        """Returns the output of a step. To be called in the order of steps. The scheduler will drop
        the tokens that this step samples for requests in `void`. So the next drafts of these
        requests continue their tokens before this step.
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
        """Returns the drafts for `plan`, the next step, which has only placeholders for them. The
        first draft that a grammar refuses and all later drafts are -1. Drafts of requests that have
        ended, or that `plan` admits, remain placeholders.
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
        """How many leading tokens of `following` the request's grammar allows after `held`."""
        grammar = self._grammars.get(request.request_id)
        if grammar is None:
            return len(following)
        return grammar.num_allowed(following, len(held) - request.num_prompt_tokens)

    def take_back(self, requests: Iterable[Request]) -> None:
        """Removes sampled tokens that the scheduler dropped from the stored tokens of requests."""
        for request in requests:
            self._tokens[request] = list(request.token_ids)

    def _sampled(self, plan: SchedulerOutput, index: int, held: list[int]) -> list[int]:
        """The accepted drafts and one more token. Empty if the step does not compute the last known
        token of the request.
        """
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
        """Proposes `count` drafts. About seven in ten are right, the others one too large."""
        return [
            token if (len(tokens) * 7 + index * 13) % 10 < 7 else token + 1
            for index, token in enumerate(self._continuation(request, tokens, count))
        ]


def next_token(tokens: list[int]) -> int:
    """The token that the simulated model samples after `tokens`."""
    return (sum(tokens[-4:]) * 31 + len(tokens) * 7) % 997 + 3


def continuation(tokens: list[int], count: int) -> list[int]:
    longer = list(tokens)
    for _ in range(count):
        longer.append(next_token(longer))
    return longer[len(tokens) :]
