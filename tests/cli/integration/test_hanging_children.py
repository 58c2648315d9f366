"""The supervisor of `stepwell up` kills hanging child processes, says why, and restarts them."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.processes.child import Child
from services.cli.processes.liveness import LivenessPolicy, until_hung
from services.cli.processes.run_directory import run_directory
from services.cli.processes.supervisor import RestartPolicy, Stage, Supervisor
from services.common.process.watchdog.ended import was_ended
from services.common.process.watchdog.proc import processor_times
from tests.cli.children import Journal, health_server, started
from tests.waiting import until

QUICK = RestartPolicy(first_delay_seconds=0.05, longest_delay_seconds=0.2)
SILENCE_SECONDS = 2.0
LIVENESS = LivenessPolicy(stopped_share=0.2, period_seconds=0.1)


class Watched:
    """A child process that answers health checks, its supervisor, and the supervisor's reports."""

    def __init__(
        self,
        directory: Path,
        silence_seconds: float = SILENCE_SECONDS,
        liveness: LivenessPolicy = LIVENESS,
    ) -> None:
        self.directory = directory
        self.journal = Journal()
        spec = health_server("pool", directory, silence_seconds=silence_seconds)
        self.supervisor = Supervisor([Stage((spec,), 2)], self.journal, QUICK, liveness)

    @property
    def pid(self) -> int:
        return self.supervisor.pid("pool")

    async def until_replaced(self) -> str:
        """Waits until the child was killed and is ready again. Returns the reason for the kill."""
        await until(lambda: ("pool", 1) in self.journal.readies)
        [(name, reason)] = self.journal.hangs
        assert name == "pool"
        assert [death[:2] for death in self.journal.deaths] == [("pool", "killed by SIGKILL")]
        return reason


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    with run_directory() as directory:
        watched = Watched(directory)
        running = await started(watched.supervisor)
        yield watched
        watched.supervisor.stop.set()
        await running


async def test_a_stopped_child_is_killed_and_started_again() -> None:
    """Children may be silent for 200 s. A child that a signal has stopped is killed long before."""
    liveness = LivenessPolicy(stopped_share=0.005, period_seconds=0.1)
    with run_directory() as directory:
        watched = Watched(directory, 100 * SILENCE_SECONDS, liveness)
        running = await started(watched.supervisor)
        killed = watched.pid
        os.kill(killed, signal.SIGSTOP)
        assert "the process was stopped" in await watched.until_replaced()
        address = f"unix:{directory}/pool.sock"
        assert was_ended(address, killed)
        assert not was_ended(address, watched.pid)
        watched.supervisor.stop.set()
        await running


async def test_a_child_that_is_stopped_while_it_starts_is_killed_and_started_again() -> None:
    with run_directory() as directory:
        spec = health_server("slow", directory, silence_seconds=SILENCE_SECONDS, start_seconds=0.5)
        journal = Journal()
        supervisor = Supervisor([Stage((spec,), 2)], journal, QUICK, LIVENESS)
        running = await started(supervisor)
        first = supervisor.pid("slow")
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pid("slow") != first)
        os.kill(supervisor.pid("slow"), signal.SIGSTOP)
        await until(lambda: bool(journal.readies[1:]))
        [(name, reason)] = journal.hangs
        assert (name, "the process was stopped" in reason) == ("slow", True)
        supervisor.stop.set()
        await running


async def test_a_stopped_child_gets_no_more_time_because_it_hung_before() -> None:
    with run_directory() as directory:
        spec = health_server("pool", directory, silence_seconds=SILENCE_SECONDS)
        child = await Child.start(spec, lambda _: None)
        await spec.until_ready()
        os.kill(child.pid, signal.SIGSTOP)
        patient = LivenessPolicy(stopped_share=0.2, period_seconds=0.1)
        assert patient.stopped_share * patient.silence_seconds(SILENCE_SECONDS, 7) > 10
        why = await asyncio.wait_for(until_hung(child, lambda: True, 7, patient), 8)
        assert "the process was stopped" in why
        child.kill()
        await child.wait()


async def test_a_child_whose_event_loop_stands_still_is_killed_and_started_again(
    watched: Watched,
) -> None:
    os.kill(watched.pid, signal.SIGUSR2)

    assert "the process has answered no health check for 2." in await watched.until_replaced()


async def test_a_child_that_gets_no_processor_is_left_alone_until_it_gets_one() -> None:
    """The child shares one processor with an endless loop of higher priority."""
    (processor, *_) = os.sched_getaffinity(0)
    with run_directory() as directory:
        spec = health_server("pool", directory, silence_seconds=0.5)
        child = await Child.start(spec, lambda _: None)
        await spec.until_ready()
        for thread in processor_times(child.pid).threads:
            os.sched_setaffinity(thread, {processor})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        loop = (
            "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (20, 20))\nwhile True: pass"
        )
        hog = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", loop)
        os.sched_setaffinity(hog.pid, {processor})
        watching = asyncio.create_task(until_hung(child, lambda: True, 0, LIVENESS))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(watching), 2.0)
        hog.kill()
        os.kill(child.pid, signal.SIGUSR2)
        assert "the process has answered no health check" in await asyncio.wait_for(watching, 20)
        child.kill()
        await asyncio.gather(child.wait(), hog.wait())


async def test_a_child_that_says_that_it_cannot_go_on_is_killed_and_started_again(
    watched: Watched,
) -> None:
    os.kill(watched.pid, signal.SIGUSR1)

    assert (
        await watched.until_replaced()
        == "its health check says that the service cannot recover by itself"
    )


async def test_a_removed_directory_is_made_again_for_children_with_new_sockets(
    watched: Watched,
) -> None:
    shutil.rmtree(watched.directory)

    assert "pool.sock was removed" in await watched.until_replaced()
    assert watched.directory.stat().st_mode & 0o777 == 0o700


async def test_the_time_that_a_child_takes_to_start_is_no_silence() -> None:
    with run_directory() as directory:
        spec = health_server("slow", directory, silence_seconds=0.5, start_seconds=1.5)
        journal = Journal()
        supervisor = Supervisor([Stage((spec,), 2)], journal, QUICK, LIVENESS)
        running = await started(supervisor)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 2 * LIVENESS.period_seconds)
        assert not journal.hangs
        supervisor.stop.set()
        await running


async def test_time_in_which_the_supervisor_did_not_run_is_not_held_against_a_child(
    watched: Watched,
) -> None:
    os.kill(watched.pid, signal.SIGUSR2)
    await asyncio.sleep(LIVENESS.period_seconds)
    time.sleep(SILENCE_SECONDS)  # noqa: ASYNC251 - the supervisor stands still
    await asyncio.sleep(0)

    assert not watched.journal.hangs


def test_each_hang_after_the_second_in_a_row_makes_the_supervisor_more_patient() -> None:
    policy = LivenessPolicy(factor=2, longest_seconds=10)
    assert [policy.silence_seconds(2.0, hangs) for hangs in range(6)] == [2, 2, 4, 8, 10, 10]
    assert policy.silence_seconds(20.0, 3) == 20
