"""The interfaces of a deployment and of its gateways that a check uses."""

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from services.cli.errors import CommandError


class Fault(enum.Enum):
    """The ways to break a container."""

    KILL = "kill"
    """The process ends as in a crash, and the container engine restarts it."""
    PAUSE = "pause"
    """The container is frozen for a while. Its connections stay open."""
    DISCONNECT = "disconnect"
    """The container is removed from its networks for a while, but continues to run."""
    STOP = "stop"
    """The container is stopped as by an operator: the process drains. Later it is started."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of the deployment. `name` is its compose service. `role` is the kind of service,
    such as `worker`. `replica` is empty for a container outside the replicas. `problem` is the
    reason why the container is not healthy, or empty. `started_at` is the start time as text.
    """

    id: str
    name: str
    role: str
    replica: str
    problem: str
    started_at: str
    tag: str
    """The tag of the image."""
    hosts: frozenset[str]
    """Host names that resolve to the container in its networks."""


class Deployment(Protocol):
    """The containers of a compose project."""

    def containers(self) -> Sequence[Container]:
        """All containers, sorted by name."""

    def broken(self, container: Container, fault: Fault) -> AbstractContextManager[None]:
        """Breaks a container. At the end of the `with` block, the fault is undone if necessary."""


class Operator(Protocol):
    """The commands of `docs/deploying.md` for a running compose project."""

    def stop(self, name: str) -> None:
        """Stops a service of the compose files after it has drained."""

    def replace(self, names: Sequence[str], tag: str) -> None:
        """Starts services of the compose files with images of a tag, in place of the old ones."""

    def create_key(self) -> str:
        """Creates an API key."""

    def revoke_key(self, key: str) -> None:
        """Revokes an API key."""

    def is_accepted(self, key: str, gateway: str) -> bool:
        """Asks a gateway, by the name of its service, whether it accepts an API key."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a stream's runs. A run whose connection breaks is sent again with the same
    idempotency key.
    """

    texts: frozenset[str]
    """The distinct texts of complete runs."""
    num_runs: int
    """The number of complete runs."""
    breaks: tuple[str, ...]
    """The reason of each break of a connection."""
    error: str
    """The error that ended the stream, or empty."""
    longest_gap_seconds: float
    """The longest wait for an event."""

    @property
    def failures(self) -> Sequence[str]:
        """The reasons of all breaks and of the end."""
        return [*self.breaks, self.error] if self.error else self.breaks


class Streams(Protocol):
    """Streams that are read concurrently, one for each prompt. A stream that ends begins again."""

    def begin(self) -> None:
        """Sends the requests. Returns when each stream has delivered some text or has failed."""

    def answers(self) -> Sequence[Answer]:
        """Waits until the current run of each stream has ended, and starts no other runs. Returns
        the results in the order of the prompts.
        """


class Fleet(Protocol):
    """The gateways, as a client sees them."""

    api_key: str | None
    """The key of requests that begin from now on."""

    def streams(self) -> Streams:
        """New streams, with the same prompts each time."""

    def running(self) -> dict[str, int]:
        """Maps the scheduler's host of each ready replica to its number of running requests."""


class Trial(Protocol):
    """An event that the streams must survive."""

    name: str
    breaks_streams: bool
    """Whether connections of clients may break, so that clients send their requests again."""

    def __call__(self, running: Mapping[str, int], settle: Callable[[], object]) -> Sequence[str]:
        """Causes the event while streams run. Returns the names of the containers concerned.
        `running` is the number of running requests of each replica. `settle` waits until all
        containers are healthy. It raises Unhealthy if that takes too long.
        """


class Unhealthy(CommandError):
    """The deployment did not become healthy in time."""
