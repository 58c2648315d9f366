"""The interfaces of a deployment and of its gateway that a check uses."""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """The ways to break a container."""

    KILL = "kill"
    """The process ends as in a crash, and the container engine restarts it."""
    PAUSE = "pause"
    """The container is frozen for a while. Its connections stay open."""
    DISCONNECT = "disconnect"
    """The container is removed from its networks for a while, but continues to run."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of the deployment. `role` is the service that it runs, such as `worker`.
    `replica` is empty for a container outside the replicas. `problem` is the reason why the
    container is not healthy, or empty. `started_at` is the start time as text.
    """

    id: str
    name: str
    role: str
    replica: str
    problem: str
    started_at: str
    hosts: frozenset[str]
    """Host names that resolve to the container in its networks."""


class Deployment(Protocol):
    """The containers of a compose project."""

    def containers(self) -> Sequence[Container]:
        """All containers, sorted by name."""

    def broken(self, container: Container, fault: Fault) -> AbstractContextManager[None]:
        """Breaks a container. At the end of the `with` block, the fault is undone if necessary."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a stream's runs had: distinct texts, an error or "", the longest wait for an event."""

    texts: frozenset[str]
    error: str
    longest_gap_seconds: float


class Streams(Protocol):
    """Streams that are read concurrently, one for each prompt. A stream that ends begins again."""

    def begin(self) -> None:
        """Sends the requests. Returns when each stream has delivered some text or has failed."""

    def answers(self) -> Sequence[Answer]:
        """Waits until the current run of each stream has ended, and starts no other runs. Returns
        the results in the order of the prompts.
        """


class Fleet(Protocol):
    """The gateway, as a client sees it."""

    def streams(self) -> Streams:
        """New streams, with the same prompts each time."""

    def running(self) -> dict[str, int]:
        """Maps the scheduler's host of each ready replica to its number of running requests."""
