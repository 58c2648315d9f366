"""The worker's options (optional features). To remove one, delete its folder and its lines here."""

from collections.abc import Callable

from services.worker.options.simulated.platform import select_simulated
from services.worker.options.tier import with_tier
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import without_tier
from services.worker.platform_choice import SelectPlatform, select_platform
from services.worker.platforms.interface import RunnerParts

PLATFORM: SelectPlatform = select_platform
PLATFORM = select_simulated

TIER: Callable[[RankSetup, RunnerParts], RunnerParts] = without_tier
TIER = with_tier
