"""The setup of a rank (settings, platform, group), from which the rank's parts are built."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.worker.backends.device import dtype_name
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.core.lockstep import Lockstep
from services.worker.core.pipeline import PipelineStage
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.platform_choice import SelectPlatform, is_batch_invariant, select_platform
from services.worker.platforms.interface import Platform, RunnerParts
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The settings, platform and group of a rank. `group` is None for a single worker.

    `checkpoint_reached` is called often during startup, and may raise to abort it. `ranks`
    exchanges tensors on the platform's device with the other tensor-parallel ranks.
    """

    settings: WorkerSettings
    platform: Platform
    ranks: Ranks
    group: Group | None
    membership: Membership
    checkpoint_reached: Callable[[], None]

    def least_of_ranks(self, name: str, value: int) -> int:
        return value if self.group is None else self.group.smallest(name, value)

    def wait_for_ranks(self) -> None:
        """Waits until every rank has called this method."""
        if self.group is not None:
            self.group.gather("loaded", "")

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Returns a function to call with two numbers: completed parts and all parts. The function
        calls `checkpoint_reached`. After each tenth of the parts, it logs `what` and the
        percentage, at most once in _QUIET_SECONDS.
        """
        logged = time.monotonic()

        def log_progress(done: int, total: int) -> None:
            nonlocal logged
            self.checkpoint_reached()
            is_tenth = done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total
            if is_tenth and time.monotonic() >= logged + _QUIET_SECONDS:
                logged = time.monotonic()
                logger.info("%s: %d%%", what, 100 * done // total)

        return log_progress


def set_up_rank(
    settings: WorkerSettings,
    checkpoint_reached: Callable[[], None],
    group: Group | None,
    select: SelectPlatform = select_platform,
) -> RankSetup:
    """Selects the platform of a rank, and how the rank exchanges tensors with other ranks. Raises
    UnsuitableDevice, KernelsUnavailable and SettingError as `select_platform` does.
    """
    platform = select(settings, checkpoint_reached, group)
    return RankSetup(
        settings,
        platform,
        ranks=ALONE if group is None else group.ranks_on(platform.torch_device, platform.kernels()),
        group=group,
        membership=Membership() if group is None else group.membership,
        checkpoint_reached=checkpoint_reached,
    )


def with_group(setup: RankSetup, parts: RunnerParts, fingerprint: bytes) -> RunnerParts:
    """If there are other ranks, adds a Lockstep (which runs each step together with them), and a
    pipeline stage if the model is divided into stages. Raises GroupBroken if the ranks have
    different models or settings.
    """
    group = setup.group
    if group is None:
        return parts
    group.require_same(_in_common(setup, parts, fingerprint))
    every, explain = setup.settings.check_ranks_every_steps, group.watch.explain
    own, loaded, stage = setup.membership, parts.loaded, None
    lockstep = Lockstep(setup.ranks, every, explain, own.rank)
    if group.link is not None:
        link, num_stages = group.link, own.pipeline_parallel_size
        stage = PipelineStage(own.stage, num_stages, link, loaded.hidden_size, loaded.dtype)
    return replace(parts, lockstep=lockstep, stage=stage)


def _in_common(setup: RankSetup, parts: RunnerParts, fingerprint: bytes) -> dict[str, str]:
    settings = setup.settings
    return {
        "kv_cache_dtype": settings.kv_cache_dtype.value,
        "the model": fingerprint.hex()[:16],
        "dtype": dtype_name(parts.loaded.dtype),
        "max_model_len": str(parts.loaded.max_model_len),
        "max_num_seqs": str(settings.max_num_seqs),
        "max_num_batched_tokens": str(settings.max_num_batched_tokens),
        "check_ranks_every_steps": str(settings.check_ranks_every_steps),
        "max_cpu_loras": str(settings.num_lora_slots),
        "max_lora_rank": str(settings.max_lora_rank),
        "speculative_config": str(settings.speculative_config),
        "batch_invariant": str(is_batch_invariant(settings, parts.shape.device)),
        "what computes": type(parts.kernels).__name__,
    }
