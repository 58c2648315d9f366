"""Forms a group of ranks, the processes that run one model. All ranks find each other through rank
0.

1. Each rank connects to the store, which rank 0 hosts. A second rank with the same number is
   refused.
2. Each rank writes its address to the store, and all pairs of ranks connect, so that each rank
   notices when another one ends.
3. The ranks of a pipeline stage exchange tensors through shared memory if they are on one machine
   and have kernels for it, otherwise over the network interfaces that reach rank 0.
4. Settings that must be equal on all ranks are compared. Other values, such as the number of
   blocks, are set to the minimum over the ranks.
"""

import datetime
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.backends.kernels import Kernels
from services.worker.backends.ranks import ALONE, Ranks, SharedRanks
from services.worker.parallel.collectives import GlooRanks, NcclRanks, StageLink, dist
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.membership import Membership
from services.worker.parallel.shared_memory import made_memory, mapped_memory
from services.worker.parallel.watch import Watch

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.05
_RANK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on how long ranks wait for each other while the group forms, and in a collective."""

    join_seconds: float = 600.0
    collective_seconds: float = 60.0


class Group:
    """A group of ranks. The constructor forms it. `link` connects this pipeline stage to the
    previous and next stages. It is None if there is one stage.

    `local_ranks` are the ranks on this machine or in this container, which share its memory and
    processors. `checkpoint_reached` is called repeatedly while the constructor waits, and may raise
    to abort it.
    """

    def __init__(
        self,
        membership: Membership,
        timeouts: Timeouts,
        on_broken: Callable[[GroupBroken], None],
        checkpoint_reached: Callable[[], None],
    ) -> None:
        self.membership = membership
        self._deadline: float | None = time.monotonic() + timeouts.join_seconds
        self._timeouts = timeouts
        self._checkpoint_reached = checkpoint_reached
        self._timeout = datetime.timedelta(seconds=timeouts.collective_seconds)
        address = self._own_address()
        try:
            self._store = self._open_store(address)
            self._introduce()
            peers = self._connect_peers(address)
        except (OSError, RuntimeError) as error:
            raise GroupBroken(
                f"the ranks cannot connect at {membership.master_addr}:{membership.master_port}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self._shared: SharedRanks | None = None
        self._on_broken = on_broken
        self.watch = Watch(peers, self._break)
        self._address = address
        self.link: StageLink | None = None
        if membership.pipeline_parallel_size > 1:
            with self._explained():
                self.link = StageLink(self._store, membership, address, self._timeout)
        self._deadline = None
        hosts = self.gather("machine", f"{socket.gethostname()} {_boot_id()}")
        own = hosts[membership.rank]
        self.local_ranks = [rank for rank, host in enumerate(hosts) if host == own]
        logger.info("rank %d of %d: all ranks have joined", membership.rank, membership.size)

    def ranks_on(self, device: torch.device, kernels: Kernels) -> Ranks:
        """Returns the collectives of this rank's pipeline stage, for tensors on the CPU or on the
        current CUDA device, where `kernels` compute. Every rank of the group must call this method
        once.
        """
        own, on_cpu = self.membership, device.type == "cpu"
        place = own.tensor_parallel_rank, own.tensor_parallel_size
        seconds = self._timeouts.collective_seconds
        shared = kernels.shared_ranks(*place, seconds) if on_cpu and place[1] > 1 else None
        self._shared = self._sharing(shared)
        if self._shared is not None:
            if self.watch.is_broken:
                self._shared.end()
            logger.info("the ranks of a stage exchange tensors through shared memory")
            return self._shared
        ranks = self._gloo_ranks()
        return ranks if on_cpu else NcclRanks(self._store, ranks, self._timeout)

    def gather(self, what: str, value: str) -> list[str]:
        """Returns the values of all ranks, in rank order. `what` is a unique name of this exchange.
        Waits for all ranks without a deadline, until a rank's process ends.
        """
        size = self.membership.size
        self._store.set(f"{what}/{self.membership.rank}", value)
        self._await([f"{what}/{rank}" for rank in range(size)])
        return [self._store.get(f"{what}/{rank}").decode() for rank in range(size)]

    def require_same(self, values: Mapping[str, str]) -> None:
        """Raises GroupBroken unless the named values are equal on all ranks."""
        gathered = [json.loads(text) for text in self.gather("values", json.dumps(dict(values)))]
        for rank, other in enumerate(gathered):
            for name, first in gathered[0].items():
                if other.get(name) != first:
                    raise GroupBroken(
                        f"{name} is {first} on rank 0, but {other.get(name)} on rank {rank}"
                    )

    def smallest(self, what: str, value: int) -> int:
        """Returns the minimum of all ranks' values. `what` is a unique name of this exchange."""
        return min(map(int, self.gather(what, str(value))))

    def close(self, *, is_stopped: bool = False) -> None:
        """Closes the connections, which the other ranks notice. `is_stopped` tells them that this
        rank has received a stop signal.
        """
        self.watch.close(is_stopped=is_stopped)

    def _own_address(self) -> str:
        """The address of this rank's interface to rank 0. Waits until rank 0's name resolves."""
        master = (self.membership.master_addr, self.membership.master_port)
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # a datagram socket sends nothing here
                    return str(probe.getsockname()[0])
            except OSError as error:
                self._wait(f"MASTER_ADDR {master[0]} cannot be reached: {error.strerror}")

    def _open_store(self, own_address: str) -> Any:
        """Opens the store. Rank 0 hosts it, and listens only at the address that others use."""
        membership = self.membership
        address, port = membership.master_addr, membership.master_port
        given: dict[str, Any] = {}
        if membership.rank == 0:
            listener = _listen(own_address, port, membership.size)
            given = {"is_master": True, "master_listen_fd": listener.detach()}
        else:
            self._await_listener(address, port)
        timeout = datetime.timedelta(seconds=self._timeouts.join_seconds)
        return dist.TCPStore(
            *(address, port, membership.size), timeout=timeout, wait_for_workers=False, **given
        )

    def _await_listener(self, address: str, port: int) -> None:
        while True:
            try:
                socket.create_connection((address, port), timeout=1).close()
            except OSError:
                self._wait(f"rank 0 does not listen at {address}:{port}")
            else:
                return

    def _introduce(self) -> None:
        rank, stages = self.membership.rank, self.membership.pipeline_parallel_size
        size = f"{self.membership.size}" + (f" in {stages} stages" if stages > 1 else "")
        if self._store.add(f"joined/{rank}", 1) > 1:
            raise GroupBroken(
                f"rank {rank} has already joined this group: either two workers have the same "
                "rank, or this worker restarted before the other ranks ended"
            )
        if rank == 0:
            self._store.set("size", size)
        self._await(["size"])
        expected = self._store.get("size").decode()
        if expected != size:
            raise GroupBroken(f"rank 0 has the group size {expected}, but rank {rank} has {size}")

    def _connect_peers(self, address: str) -> dict[int, socket.socket]:
        rank, size = self.membership.rank, self.membership.size
        peers = {}
        with _listen(address, 0, size) as listener:
            listener.settimeout(_LOOK_AGAIN_SECONDS)
            self._store.set(f"watch/{rank}", f"{address} {listener.getsockname()[1]}")
            for lower in range(rank):
                self._await([f"watch/{lower}"])
                host, port = self._store.get(f"watch/{lower}").decode().split()
                peers[lower] = socket.create_connection((host, int(port)), timeout=10)
                peers[lower].sendall(rank.to_bytes(_RANK_BYTES, "little"))
            while len(peers) < size - 1:
                missing = sorted(set(range(size)) - {rank} - peers.keys())
                try:
                    connection, _ = listener.accept()
                    connection.settimeout(10)
                    number = int.from_bytes(connection.recv(_RANK_BYTES), "little")
                except OSError:
                    self._wait(f"rank {missing[0]} has not joined")
                    continue
                if number in missing:
                    peers[number] = connection
                else:  # not a rank, for example a port scanner
                    connection.close()
        return peers

    def _break(self, error: GroupBroken) -> None:
        if self._shared is not None:
            self._shared.end()
        self._on_broken(error)

    def _sharing(self, shared: SharedRanks | None) -> SharedRanks | None:
        """Returns `shared` with memory that all ranks of this stage have mapped, or None if a rank
        cannot map it. Every rank of the group must call this method, with None if `shared` is not
        possible.
        """
        size, memory, address = self.membership.tensor_parallel_size, None, ""
        first = self.membership.stage * size
        peers = range(first, first + size)
        if not set(peers) <= set(self.local_ranks):
            shared = None
        with ExitStack() as offer:
            if shared is not None and self.membership.rank == first:
                with suppress(OSError):
                    memory, address = offer.enter_context(made_memory(shared.num_bytes))
            address = self.gather("memory", address)[first]
            if shared is not None and memory is None and address:
                memory = mapped_memory(address, shared.num_bytes)
            if shared is not None and memory is not None:
                shared.use(memory)
            answers = self.gather("mapped", "" if memory is None else "yes")
        return shared if all(answers[peer] for peer in peers) else None

    def _gloo_ranks(self) -> Ranks:
        own = self.membership
        if own.tensor_parallel_size == 1:
            return ALONE
        store = dist.PrefixStore(f"stage {own.stage}", self._store)
        place = own.tensor_parallel_rank, own.tensor_parallel_size
        with self._explained():
            return GlooRanks(store, *place, self._address, self._timeout)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Converts the RuntimeError of a failed gloo connection to GroupBroken."""
        try:
            yield
        except RuntimeError as error:
            failed = GroupBroken(f"the ranks cannot connect: {str(error).splitlines()[0]}")
            raise self.watch.explain(failed) from error

    def _await(self, keys: list[str]) -> None:
        while True:
            try:
                if self._store.check(keys):
                    return
            except RuntimeError as error:
                raise GroupBroken("rank 0, through which the ranks connect, has ended") from error
            self._wait(f"another rank has not sent its value of {keys[0].partition('/')[0]!r}")

    def _wait(self, why: str) -> None:
        """Sleeps briefly. If the join timeout is over, raises GroupBroken with the reason `why`."""
        self._checkpoint_reached()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise GroupBroken(
                f"the ranks have not joined within {self._timeouts.join_seconds:g} s: {why}"
            )
        time.sleep(_LOOK_AGAIN_SECONDS)


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=max(backlog, 8))


def select_cuda_device(local_ranks: list[int], rank: int) -> None:
    """Selects one GPU for this rank. Raises GroupBroken if there are more local ranks than GPUs."""
    available = torch.cuda.device_count()
    if 0 < available < len(local_ranks):
        raise GroupBroken(
            f"{len(local_ranks)} ranks are on this machine, which has only {available} GPUs, but "
            "each rank needs its own GPU: start fewer ranks, or set --device cpu"
        )
    if available:  # without a GPU, the platform raises an error
        torch.cuda.set_device(local_ranks.index(rank))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
