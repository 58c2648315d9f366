"""Makes what proposes drafts."""

from dataclasses import replace

from services.worker.core.drafter import Drafter
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import refuse_speculation
from services.worker.platforms.interface import Parts
from services.worker.speculation.config import parse_speculative_config
from services.worker.speculation.ngram import NgramProposer


def with_drafter(setup: RankSetup, parts: Parts) -> Parts:
    """The parts with what proposes drafts, if the settings ask for it. Raises NoSpeculation."""
    if setup.settings.speculative_config is None:
        return parts
    refuse_speculation(setup, parts)
    config = parse_speculative_config(setup.settings.speculative_config)
    num_rows = config.num_rows
    if num_rows is None:
        num_rows = setup.platform.num_speculative_rows
    limits = replace(
        parts.limits,
        num_speculative_tokens=config.num_speculative_tokens,
        num_speculative_rows=num_rows,
    )
    drafter = Drafter(NgramProposer(config), config.num_speculative_tokens)
    return replace(parts, limits=limits, drafter=drafter)
