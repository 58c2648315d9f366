import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.backends.ranks import ALONE, Ranks
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.platform_choice import SelectPlatform, select_platform
from services.worker.platforms.interface import Platform
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The arguments from which all parts of one rank are built. `group` is None for a single
    worker.

    `checkpoint_reached` is called often during startup, and may raise to abort it. `ranks` are the
    tensor-parallel ranks, whose collectives exchange tensors on the platform's device.
    """

    settings: WorkerSettings
    platform: Platform
    ranks: Ranks
    group: Group | None
    membership: Membership
    checkpoint_reached: Callable[[], None]

    def least_of_ranks(self, name: str, value: int) -> int:
        return value if self.group is None else self.group.smallest(name, value)

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Returns a function to call with the numbers of parts done and of all parts. It logs
        `what` and the percentage after each tenth of the parts, at most once in _QUIET_SECONDS, and
        calls `checkpoint_reached`.
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
    """Selects the platform and its collectives. Raises UnsuitableDevice, KernelsUnavailable and
    SettingError.
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
