"""What a check needs of a deployment and of its clients."""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """How a container is broken."""

    KILL = "kill"
    """Its process ends as in a crash; the engine starts it again."""
    PAUSE = "pause"
    """It is frozen for a while, and keeps its connections."""
    DISCONNECT = "disconnect"
    """It is taken off its networks for a while, and runs on."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of the deployment. `role` is the service that it runs, such as `worker`;
    `replica` is empty where it belongs to none; `problem` says what keeps it from being healthy,
    or is empty; `started_at` is the engine's text for when it was started.
    """

    id: str
    name: str
    role: str
    replica: str
    problem: str
    started_at: str
    hosts: frozenset[str]
    """Names in the networks that lead to it."""


class Deployment(Protocol):
    """The containers of a compose project."""

    def containers(self) -> Sequence[Container]:
        """All of them, in the order of their names."""

    def broken(self, container: Container, fault: Fault) -> AbstractContextManager[None]:
        """Breaks a container; the end of the context undoes a fault that lasts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a stream gave: its text, or the error that it ended with, and the longest time between
    two of its events.
    """

    text: str
    error: str
    longest_gap_seconds: float


class Streams(Protocol):
    """Streams that are read at once, one for each prompt."""

    def begin(self) -> None:
        """Sends the requests, and returns when each stream has given some text or has ended."""

    @property
    def num_running(self) -> int:
        """How many have not ended."""

    def answers(self) -> Sequence[Answer]:
        """Waits for their ends; in the order of the prompts."""


class Fleet(Protocol):
    """The gateway, as a client sees it."""

    def streams(self) -> Streams:
        """New streams, of the same prompts each time."""

    def running(self) -> dict[str, int]:
        """Requests that run at each ready replica, by the host of its scheduler."""
