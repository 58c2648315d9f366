"""The setup of a rank: its settings, platform and group."""

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.backends.ranks import ALONE, Ranks
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.platform_choice import select_platform
from services.worker.platforms.interface import Platform
from services.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The arguments from which all parts of one rank are built. `group` is None for a single
    worker.

    `checkpoint_reached` is called often during startup, and may raise to abort it. `ranks`
    are the tensor-parallel ranks, whose collectives exchange tensors on the platform's device.
    """

    settings: WorkerSettings
    platform: Platform
    ranks: Ranks
    group: Group | None
    membership: Membership
    checkpoint_reached: Callable[[], None]

    def least_of_ranks(self, name: str, value: int) -> int:
        """The minimum of all ranks' values of this name."""
        return value if self.group is None else self.group.smallest(name, value)


def set_up_rank(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> RankSetup:
    """Selects the platform and its collectives. Raises UnsuitableDevice and KernelsUnavailable."""
    platform = select_platform(settings, checkpoint_reached, group)
    return RankSetup(
        settings,
        platform,
        ranks=ALONE if group is None else group.ranks_on(platform.torch_device, platform.kernels()),
        group=group,
        membership=Membership() if group is None else group.membership,
        checkpoint_reached=checkpoint_reached,
    )
