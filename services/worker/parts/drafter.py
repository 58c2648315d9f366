"""Makes what proposes drafts."""

from dataclasses import replace

from services.worker.core.draft_source import ProposerSource
from services.worker.core.drafter import Drafter
from services.worker.parts.draft_model import load_draft_model
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import refuse_speculation
from services.worker.platforms.interface import Parts
from services.worker.speculation.config import parse_speculative_config
from services.worker.speculation.ngram import NgramProposer


def with_drafter(setup: RankSetup, parts: Parts) -> Parts:
    """The parts with what proposes drafts, if the settings ask for it. Raises NoSpeculation, and
    ModelError for a draft model.
    """
    if setup.settings.speculative_config is None:
        return parts
    refuse_speculation(setup, parts)
    config = parse_speculative_config(setup.settings.speculative_config)
    most, num_rows = config.num_speculative_tokens, config.num_rows
    if num_rows is None:
        num_rows = setup.platform.num_speculative_rows
    limits = replace(parts.limits, num_speculative_tokens=most, num_speculative_rows=num_rows)
    parts = replace(parts, limits=limits)
    if config.model is not None:
        return replace(parts, draft_model=load_draft_model(setup, parts, config.model))
    return replace(parts, drafter=Drafter(ProposerSource(NgramProposer(config)), most))
