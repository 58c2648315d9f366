"""A group of worker ranks over the simulated network (`network`).

As in the worker's `Group`, rank 0 listens, all pairs of ranks connect, and each rank notices when
another one ends. The ranks exchange only strings at the start and numbers in each step, because the
simulated device needs nothing else. A rank waits by `VirtualLane.wait`.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

from services.simulation.runtime.machine import network
from services.simulation.runtime.network import Connection, End, current_process
from services.worker.backends.ranks import ALONE, GatheringRanks, Ranks
from services.worker.parallel.errors import STOPPED, GroupBroken, rank_ended
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 0.5


class Meeting:
    """Rank 0's record of the ranks that have joined, and of the strings that they exchange."""

    def __init__(self) -> None:
        self.process = current_process()
        self.members: dict[int, MemoryGroup] = {}
        self.values: dict[str, str] = {}


class MemoryGroup(Group):
    """Replaces Group, and has the same constructor arguments."""

    def __init__(
        self,
        membership: Membership,
        timeouts: Timeouts,
        on_broken: Callable[[GroupBroken], None],
        checkpoint_reached: Callable[[], None],
    ) -> None:
        self.membership = membership
        self.process = current_process()
        self.link = None
        self.local_ranks = [membership.rank]
        self.peers: dict[int, tuple[MemoryGroup, End]] = {}
        """Maps each other rank to its group and to this rank's end of the connection."""
        self.watch: Any = MemoryWatch(self, on_broken)
        self._numbers: dict[int, deque[list[int]]] = {}
        """For each other rank, the numbers that it has sent and this rank has not read."""
        self._lane = network().loop.lane
        self._address = f"{membership.master_addr}:{membership.master_port}"
        self._timeouts = timeouts
        self._checkpoint_reached = checkpoint_reached
        self._meeting = self._join()
        for rank, peer in self._meeting.members.items():
            if rank != membership.rank and rank not in self.peers:
                ends = Connection(network(), self.process, peer.process, has_keepalive=True).ends
                self._connect(rank, peer, ends[0])
                peer._connect(membership.rank, self, ends[1])

    def _connect(self, rank: int, peer: "MemoryGroup", end: End) -> None:
        self.peers[rank] = peer, end
        self._numbers[rank] = deque()
        end.on_lost = lambda _: self.watch.ended(rank)

    def ranks_on(self, *_: object) -> Ranks:
        own = self.membership
        if own.tensor_parallel_size == 1:
            return ALONE
        return MemoryRanks(self, own.tensor_parallel_rank, own.tensor_parallel_size)

    def gather(self, what: str, value: str) -> list[str]:
        own, values = self.membership, self._meeting.values
        values[f"{what}/{own.rank}"] = value
        names = [f"{what}/{rank}" for rank in range(own.size)]
        self._wait_for(
            lambda: all(name in values for name in names),
            f"another rank has not sent its value of {what!r}",
        )
        return [values[name] for name in names]

    def close(self, *, is_stopped: bool = False) -> None:
        self.watch.close(is_stopped=is_stopped)
        if self.membership.rank == 0:
            network().unlisten(self._address, self._meeting)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Does the same as VirtualLane.wait."""
        return bool(self._lane.wait(condition, seconds))

    def wake(self) -> None:
        self._lane.wake()

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Sends `numbers` to all ranks and returns all ranks' numbers. Raises RuntimeError."""
        own = self.membership.rank
        for peer, end in self.peers.values():
            end.pipe.send(peer._receive, own, numbers)
        seconds = self._timeouts.collective_seconds
        self.wait(lambda: self.watch.is_broken or all(self._numbers.values()), seconds)
        if self.watch.is_broken or not all(self._numbers.values()):
            raise RuntimeError("not all ranks have sent their numbers in time")
        found = {rank: waiting.popleft() for rank, waiting in self._numbers.items()}
        found[own] = numbers
        return [found[rank] for rank in sorted(found)]

    def _receive(self, rank: int, numbers: list[int]) -> None:
        self._numbers[rank].append(numbers)
        self.wake()

    def _join(self) -> Meeting:
        own, listeners, address = self.membership, network().listeners, self._address
        if own.rank == 0:
            with suppress(OSError):
                network().listen(address, Meeting())
        self._wait_for(lambda: self._reaches(listeners.get(address)), "rank 0 does not listen")
        meeting = cast(Meeting, listeners[address])
        if own.rank in meeting.members:
            raise GroupBroken(f"rank {own.rank} has already joined this group")
        meeting.members[own.rank] = self
        self._meeting = meeting
        self._wait_for(lambda: len(meeting.members) == own.size, "another rank has not joined")
        return meeting

    def _reaches(self, meeting: Any) -> bool:
        return isinstance(meeting, Meeting) and network().reaches(self.process, meeting.process)

    def _wait_for(self, condition: Callable[[], bool], why: str) -> None:
        end = network().loop.time() + self._timeouts.join_seconds
        while not self.wait(condition, _LOOK_SECONDS):
            self._checkpoint_reached()
            if self.watch.is_broken or network().loop.time() > end:
                raise GroupBroken(f"the ranks have not joined: {why}")


class MemoryWatch:
    """Replaces Watch, which notices that another rank has ended."""

    def __init__(self, group: MemoryGroup, on_broken: Callable[[GroupBroken], None]) -> None:
        self.is_broken = False
        self._group = group
        self._on_broken = on_broken
        self._error: GroupBroken | None = None
        self._is_closed = False

    def report(self, error: GroupBroken) -> GroupBroken:
        if self._error is None:
            self._error, self.is_broken = error, not self._is_closed
            if self.is_broken:
                self._tell(str(error))
                self._group.wake()
                self._on_broken(error)
        return self._error

    def explain(self, error: GroupBroken) -> GroupBroken:
        self._group.wait(lambda: self.is_broken, _PATIENCE_SECONDS)
        return self.report(error)

    def close(self, *, is_stopped: bool = False) -> None:
        self._is_closed = True
        if is_stopped and self._error is None:
            self._tell(STOPPED)
        for _, end in self._group.peers.values():
            end.close()

    def ended(self, rank: int, reason: str = "") -> None:
        """Called when another rank has ended. `reason` is empty if the rank has not sent one."""
        self.report(rank_ended(rank, reason))

    def _tell(self, reason: str) -> None:
        for peer, end in self._group.peers.values():
            end.pipe.send(peer.watch.ended, self._group.membership.rank, reason)


class MemoryRanks(GatheringRanks):
    """Exchanges numbers among ranks. The simulated device exchanges no tensors."""

    def __init__(self, group: MemoryGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return self._group.exchange(numbers)

    def _gathered(self, _: object) -> NoReturn:
        raise AssertionError("the simulated device exchanges no tensors")
