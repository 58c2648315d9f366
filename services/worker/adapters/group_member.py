import asyncio
from collections.abc import Callable

from services.common.errors import StepwellError
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership


class GroupMember:
    """A rank, or the only worker of its model. Must be constructed in a running loop.

    `broken` resolves with the reason if the group breaks.
    """

    def __init__(self, membership: Membership, timeouts: Timeouts) -> None:
        self.membership = membership
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[GroupBroken] = self._loop.create_future()
        self._group: Group | None = None

    def join(self, checkpoint_reached: Callable[[], None]) -> Group | None:
        """Waits for the other ranks, and forms the group. Returns None if there are no other ranks.
        Callable from any thread. Raises GroupBroken.

        `checkpoint_reached` is called repeatedly while this method waits, and may raise to abort
        it.
        """
        if self.membership.size > 1:
            self._group = Group(
                self.membership, self._timeouts, self._break_from_thread, checkpoint_reached
            )
        return self._group

    def report_failed_start(self, error: StepwellError) -> None:
        """Sends the other ranks the reason why this rank cannot start."""
        if self._group is not None:
            rank = self.membership.rank
            self._group.watch.report(GroupBroken(f"rank {rank} cannot start: {error}"))

    def leave(self, *, is_stopped: bool) -> None:
        """Closes the connections to the other ranks, which notice at once. If this rank
        `is_stopped` by a signal, the other ranks are notified of it.
        """
        if self._group is not None:
            self._group.close(is_stopped=is_stopped)

    def _break_from_thread(self, error: GroupBroken) -> None:
        self._loop.call_soon_threadsafe(self._break, error)

    def _break(self, error: GroupBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)
