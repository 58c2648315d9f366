"""The supervisor of `stepwell up`, with small real processes as children."""

import asyncio
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.processes.supervisor import RestartPolicy, Stage, StartFailed, Supervisor
from tests.cli.children import (
    IGNORE_SIGTERM,
    Journal,
    is_running,
    lingering_server,
    program,
    server,
    started,
    until,
)

QUICK = RestartPolicy(first_delay_seconds=0.05, longest_delay_seconds=0.2)


def group_niceness(pid: int) -> int | None:
    """The niceness of the session of a process, or None if the kernel does not support it. Each
    child has its own session.
    """
    group = Path(f"/proc/{pid}/autogroup")
    return int(group.read_text().split()[-1]) if group.exists() else None


async def test_a_killed_child_is_reported_and_started_again(tmp_path: Path) -> None:
    journal = Journal()
    supervisor = Supervisor([Stage((server("pool", tmp_path),), 2)], journal, QUICK)
    running = await started(supervisor)
    first = supervisor.pid("pool")

    os.kill(first, signal.SIGKILL)
    await until(lambda: ("pool", 1) in journal.readies)

    assert journal.deaths == [("pool", "killed by SIGKILL", ["pool serves"], 0.05)]
    assert supervisor.pid("pool") != first
    await until(lambda: journal.lines == [("pool", "pool serves")] * 2)
    supervisor.stop.set()
    await running
    assert not is_running(supervisor.pid("pool"))


async def test_a_nicer_child_goes_after_the_supervisor(tmp_path: Path) -> None:
    children = (server("pool", tmp_path), replace(server("worker", tmp_path), niceness=3))
    supervisor = Supervisor([Stage(children, 2)], Journal(), QUICK)
    running = await started(supervisor)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, supervisor.pid("pool")) == own
    assert os.getpriority(os.PRIO_PROCESS, supervisor.pid("worker")) == min(own + 3, 19)
    assert group_niceness(supervisor.pid("worker")) in (None, min(own + 3, 19))
    supervisor.stop.set()
    await running


async def test_a_team_ends_and_starts_together(tmp_path: Path) -> None:
    # If one child of a team ends, the supervisor kills the team's other children.
    first, second = (
        replace(server(name, tmp_path), team="workers") for name in ("worker-0", "worker-1")
    )
    journal = Journal()
    policy = replace(QUICK, team_end_seconds=0.2)
    supervisor = Supervisor([Stage((first, second, server("pool", tmp_path)), 2)], journal, policy)
    running = await started(supervisor)
    before = [supervisor.pid(name) for name in ("worker-0", "worker-1", "pool")]

    os.kill(before[1], signal.SIGKILL)
    await until(lambda: {("worker-0", 1), ("worker-1", 1)} <= set(journal.readies))

    after = [supervisor.pid(name) for name in ("worker-0", "worker-1", "pool")]
    assert not set(before[:2]) & set(after[:2])
    assert before[2] == after[2]
    assert not is_running(before[0])
    assert [death[:2] for death in journal.deaths] == [
        ("worker-0", "killed by SIGKILL"),
        ("worker-1", "killed by SIGKILL"),
    ]
    supervisor.stop.set()
    await running


async def test_a_child_that_never_was_ready_ends_everything(tmp_path: Path) -> None:
    fails = program(
        "worker",
        "import sys, time; print('no such model', file=sys.stderr); sys.exit(3)",
        tmp_path / "never",
    )
    supervisor = Supervisor(
        [Stage((server("pool", tmp_path),), 2), Stage((fails,), 2)], Journal(), QUICK
    )

    with pytest.raises(StartFailed) as failure:
        await supervisor.run()

    assert failure.value.name == "worker"
    assert failure.value.status == "exit status 3"
    assert failure.value.tail == ("no such model",)
    assert not is_running(supervisor.pid("pool"))


async def test_a_program_that_does_not_exist_cannot_start(tmp_path: Path) -> None:
    spec = program("worker", "", tmp_path / "never")
    missing = type(spec)(spec.name, ("/nowhere/program",), spec.environ, spec.until_ready)

    with pytest.raises(StartFailed) as failure:
        await Supervisor([Stage((missing,), 2)], Journal()).run()

    assert failure.value.tail == ("cannot execute /nowhere/program: No such file or directory",)


async def test_a_child_that_fails_after_its_first_life_is_tried_again_and_again(
    tmp_path: Path,
) -> None:
    # The first process serves. The next three end at once. All count themselves in file `mark`.
    code = """
import pathlib, sys, time
ready, mark = map(pathlib.Path, sys.argv[1:])
deaths = len(mark.read_text()) if mark.exists() else 0
mark.write_text("x" * (deaths + 1))
if 1 <= deaths <= 3:
    ready.unlink(missing_ok=True)
    sys.exit(1)
ready.touch()
time.sleep(60)
"""
    ready, mark = tmp_path / "ready", tmp_path / "mark"
    journal = Journal()
    spec = program("pool", code, ready, str(ready), str(mark))
    supervisor = Supervisor([Stage((spec,), 2)], journal, QUICK)
    running = await started(supervisor)

    ready.unlink()
    os.kill(supervisor.pid("pool"), signal.SIGKILL)
    await until(lambda: ("pool", 4) in journal.readies)

    assert [death[1] for death in journal.deaths] == ["killed by SIGKILL"] + ["exit status 1"] * 3
    assert [death[3] for death in journal.deaths] == [0.05, 0.1, 0.2, 0.2]
    supervisor.stop.set()
    await running


async def test_a_restart_is_tried_again_while_no_process_can_be_started(tmp_path: Path) -> None:
    journal = Journal()
    supervisor = Supervisor([Stage((server("pool", tmp_path),), 2)], journal, QUICK)
    running = await started(supervisor)
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        os.kill(supervisor.pid("pool"), signal.SIGKILL)
        await until(lambda: any("Too many open files" in text for _, text in journal.lines))
        assert not running.done()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    await until(lambda: ("pool", 1) in journal.readies)
    supervisor.stop.set()
    await running


async def test_stages_stop_one_after_the_other(tmp_path: Path) -> None:
    stages = [
        Stage((server("gateway", tmp_path, stop_seconds=0.3),), 5),
        Stage((server("scheduler", tmp_path, stop_seconds=0.2),), 5),
        Stage((server("pool", tmp_path), server("worker", tmp_path)), 5),
    ]
    supervisor = Supervisor(stages, Journal())
    running = await started(supervisor)

    supervisor.stop.set()
    await running

    order = (tmp_path / "journal").read_text().split()
    assert order[:2] == ["gateway", "scheduler"]
    assert sorted(order[2:]) == ["pool", "worker"]


async def test_a_child_that_goes_on_for_the_others_ends_after_them(tmp_path: Path) -> None:
    stages = [
        Stage((lingering_server("gateway", tmp_path),), 60),
        Stage((server("scheduler", tmp_path, stop_seconds=0.2),), 60),
    ]
    journal = Journal()
    supervisor = Supervisor(stages, journal)
    running = await started(supervisor)

    supervisor.stop.set()
    await running

    assert (tmp_path / "journal").read_text().split() == ["gateway", "scheduler", "gateway"]
    assert journal.stops == ["gateway", "scheduler"]
    assert not is_running(supervisor.pid("gateway"))


async def test_a_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    ready = tmp_path / "deaf.ready"
    stages = [
        Stage((program("deaf", IGNORE_SIGTERM, ready, str(ready)),), 0.3),
        Stage((server("pool", tmp_path),), 5),
    ]
    journal = Journal()
    supervisor = Supervisor(stages, journal)
    running = await started(supervisor)
    began = time.monotonic()

    supervisor.stop.set()
    await running

    assert 0.3 <= time.monotonic() - began < 20
    assert journal.kills == ["deaf"]
    assert not is_running(supervisor.pid("deaf"))
    assert (tmp_path / "journal").read_text().split() == ["pool"]


async def test_kill_now_kills_what_is_left_at_once(tmp_path: Path) -> None:
    ready = tmp_path / "deaf.ready"
    stages = [Stage((program("deaf", IGNORE_SIGTERM, ready, str(ready)),), 60)]
    supervisor = Supervisor(stages, Journal())
    running = await started(supervisor)

    supervisor.stop.set()
    supervisor.kill_now.set()
    await asyncio.wait_for(running, 60)

    assert not is_running(supervisor.pid("deaf"))


async def test_stopping_while_a_child_is_away_does_not_bring_it_back(tmp_path: Path) -> None:
    journal = Journal()
    slow = RestartPolicy(first_delay_seconds=60)
    supervisor = Supervisor(
        [Stage((server("pool", tmp_path), server("worker", tmp_path)), 5)], journal, slow
    )
    running = await started(supervisor)
    os.kill(supervisor.pid("worker"), signal.SIGKILL)
    await until(lambda: bool(journal.deaths))

    supervisor.stop.set()
    await asyncio.wait_for(running, 60)

    assert journal.stops == ["pool"]


async def test_output_comes_in_lines_however_it_was_written(tmp_path: Path) -> None:
    code = """
import sys, time
sys.stdout.write("a" * 100_000)
sys.stdout.write("\\nsplit in ")
sys.stdout.flush()
time.sleep(0.05)
sys.stdout.write("two\\n")
sys.stdout.flush()
sys.stdout.buffer.write(b"not \\xff text")
sys.exit(1)
"""
    journal = Journal()
    with pytest.raises(StartFailed) as failure:
        await Supervisor([Stage((program("noisy", code, tmp_path / "never"),), 2)], journal).run()

    assert failure.value.tail[-2:] == ("split in two", "not \ufffd text")
    assert all(len(text) <= 16_384 for _, text in journal.lines)


async def test_children_do_not_outlive_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib
from services.cli.processes.supervisor import Stage, Supervisor
from tests.cli.children import Journal, server
here = pathlib.Path({str(tmp_path)!r})
async def main():
    supervisor = Supervisor([Stage((server("a", here), server("b", here)), 5)], Journal())
    running = asyncio.create_task(supervisor.run())
    await supervisor.all_ready.wait()
    print(supervisor.pid("a"), supervisor.pid("b"), flush=True)
    await running
asyncio.run(main())
"""
    root = str(Path(__file__).parents[3])
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE, cwd=root
    )
    assert supervisor.stdout is not None
    pids = [int(pid) for pid in (await supervisor.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))

    supervisor.kill()
    await supervisor.wait()

    await until(lambda: not any(map(is_running, pids)), seconds=60)


def test_the_delay_grows_to_its_limit() -> None:
    policy = RestartPolicy(first_delay_seconds=0.1, factor=2, longest_delay_seconds=1)
    assert [policy.delay_seconds(deaths) for deaths in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1, 1]
