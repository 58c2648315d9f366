"""Converts steps to spans. Each step is a separate trace with links to its sampled requests."""

from collections.abc import Sequence

from opentelemetry.trace import Link, SpanContext

from services.common.telemetry import names
from services.common.telemetry.tracing import MAX_LINKS, Tracing
from services.scheduler.core.output import SchedulerOutput

Attributes = dict[str, str | int | float | bool | Sequence[str]]


class StepSpan:
    """The open span of a sampled step. `record` ends it when the step's tokens have arrived."""

    def __init__(self, context: SpanContext, begun: int) -> None:
        self.context = context
        self._begun = begun
        self._attributes: Attributes = {}
        self._links: list[Link] = []

    def planned(self, plan: SchedulerOutput, links: list[Link]) -> None:
        """Adds the plan's numbers, and links to the sampled requests in the step."""
        self._links = links[:MAX_LINKS]
        self._attributes = {
            names.ATTR_STEP: plan.step,
            names.ATTR_NUM_REQUESTS: len(plan.requests),
            names.ATTR_NUM_SCHEDULED_TOKENS: plan.num_tokens,
            names.ATTR_NUM_PREEMPTIONS: len(plan.preemptions),
            names.ATTR_WAIT_REASON: plan.wait_reason.value if plan.wait_reason else "",
        }
        if plan.kv_connector_metadata is not None:
            metadata = plan.kv_connector_metadata
            self._attributes |= {
                names.ATTR_NUM_STORED_BLOCKS: len(metadata.stores),
                names.ATTR_NUM_LOADED_BLOCKS: sum(len(load.blocks) for load in metadata.loads),
            }
        if len(links) > MAX_LINKS:
            self._attributes[names.ATTR_NUM_LINKS_LEFT_OUT] = len(links) - MAX_LINKS

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Adds how many drafts the step verified and accepted."""
        self._attributes |= {
            names.ATTR_NUM_DRAFT_TOKENS: num_drafts,
            names.ATTR_NUM_ACCEPTED_TOKENS: num_accepted,
        }

    def record(self, tracing: Tracing, end: int, *, lost: bool = False) -> None:
        """Ends and records the span. `lost` is true if the step's tokens did not arrive."""
        if lost:
            self._attributes[names.ATTR_IS_CUT] = True
        tracing.record(
            names.SPAN_STEP,
            self.context,
            None,
            self._begun,
            end,
            attributes=self._attributes,
            links=self._links,
        )
