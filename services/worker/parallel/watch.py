"""Notices at once when another rank of the group has ended.

Every pair of ranks has an idle connection. When a process ends for any reason, the kernel closes
its connections. Therefore the other ranks notice within a network round trip, even while no step
runs or a collective waits. Keepalive probes detect a machine that does not respond. A rank that
ends for a known reason, such as a stop signal, sends the reason first.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from services.worker.parallel.errors import STOPPED, GroupBroken, rank_ended

_LONGEST_REASON = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Watch:
    """Watches the connections to all other ranks in a thread. `peers` maps ranks to connections.

    `on_broken` is called once with the reason, in the watching thread or in the thread that calls
    `report`. It is never called after `close`.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], on_broken: Callable[[GroupBroken], None]
    ) -> None:
        self._peers = dict(peers)
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._broken: GroupBroken | None = None
        self._is_broken = threading.Event()
        self._closed = False
        self._waker, self._woken = socket.socketpair()
        for connection in self._peers.values():
            _keep_alive(connection)
        self._thread = threading.Thread(target=self._run, name="watch peers", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        return self._is_broken.is_set()

    def report(self, error: GroupBroken) -> GroupBroken:
        """Breaks the group, sends the reason to the other ranks, and returns the first error."""
        with self._lock:
            first, self._broken = self._broken is None, self._broken or error
            reported, closed = self._broken, self._closed
        if first and not closed:
            self._is_broken.set()
            self._send(str(reported))
            self._on_broken(reported)
        return reported

    def explain(self, error: GroupBroken) -> GroupBroken:
        """Reports a failure. First waits up to half a second for a message that another rank has
        ended, which would be the cause.
        """
        self._is_broken.wait(0.5)
        return self.report(error)

    def close(self, *, is_stopped: bool = False) -> None:
        """Stops watching and closes the connections, which the other ranks notice. If this rank
        `is_stopped` by a signal and the group is not broken, tells them so first.
        """
        with self._lock:
            self._closed = True
        if is_stopped and self._broken is None:
            self._send(STOPPED)
        self._waker.close()
        self._thread.join()
        self._woken.close()
        for connection in self._peers.values():
            connection.close()

    def _send(self, reason: str) -> None:
        for connection in self._peers.values():
            with suppress(OSError):
                connection.sendall(reason.encode()[:_LONGEST_REASON])

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    selector.unregister(key.fileobj)
                    self._ended(key.data)

    def _ended(self, rank: int) -> None:
        reason = ""
        with suppress(OSError):
            reason = self._peers[rank].recv(_LONGEST_REASON).decode(errors="replace")
        self.report(rank_ended(rank, reason))


def _keep_alive(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has every option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
