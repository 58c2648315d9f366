"""What a check requires of a deployment and of its clients."""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """How a container is broken."""

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
    container is not healthy, or empty. `started_at` is the engine's text for its start time.
    """

    id: str
    name: str
    role: str
    replica: str
    problem: str
    started_at: str
    hosts: frozenset[str]
    """Host names in the container's networks that resolve to it."""


class Deployment(Protocol):
    """The containers of a compose project."""

    def containers(self) -> Sequence[Container]:
        """All containers, sorted by name."""

    def broken(self, container: Container, fault: Fault) -> AbstractContextManager[None]:
        """Breaks a container. The context's end undoes a fault that does not end by itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream's distinct texts, error (or ""), and longest time between two events, in seconds."""

    texts: frozenset[str]
    error: str
    longest_gap_seconds: float


class Streams(Protocol):
    """Streams that are read concurrently, one for each prompt. A stream that ends begins again."""

    def begin(self) -> None:
        """Sends the requests. Returns when each stream has delivered some text or has failed."""

    def answers(self) -> Sequence[Answer]:
        """Waits until all streams have ended once more. Returns the answers in the order of the
        prompts.
        """


class Fleet(Protocol):
    """The gateway, as a client sees it."""

    def streams(self) -> Streams:
        """New streams, with the same prompts each time."""

    def running(self) -> dict[str, int]:
        """Maps the scheduler's host of each ready replica to its number of running requests."""
