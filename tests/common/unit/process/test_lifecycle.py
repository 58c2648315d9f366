"""The lifecycle of a service process: signals, drains, and fatal errors."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import tty
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[4]
HEAD = """
import asyncio
from services.common.errors import FailedPrecondition
from services.common.process.lifecycle import end_at_once, run_service
from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import SettingError

async def fail(after):
    await asyncio.sleep(after)
    raise FailedPrecondition("the model changed")
"""


def start(
    body: str,
    style: str = "text",
    *,
    log_level: str = "error",
    errors: IO[str] | int = subprocess.PIPE,
    unbuffered: str = "",
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", HEAD + body),
            *("--address", "127.0.0.1:0", "--log-level", log_level, "--log-format", style),
        ],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_the_service_ends_in_its_own_time(signum: int) -> None:
    process = start("""
async def serve(settings, stop):
    print("serving", flush=True)
    await stop.wait()
    await asyncio.sleep(0.05)
    print("drained", flush=True)

run_service("thing", ServiceSettings, serve)
""")
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    process.send_signal(signum)
    assert ended(process) == (0, "drained\n", "")


def test_a_second_signal_is_logged_as_one_that_changes_nothing() -> None:
    process = start(
        """
async def serve(settings, stop):
    for word in ("serving", "draining"):
        print(word, flush=True)
        await stop.wait()
        stop.clear()

run_service("thing", ServiceSettings, serve)
""",
        log_level="info",
    )
    assert process.stdout is not None
    for word in ("serving", "draining"):
        assert process.stdout.readline() == f"{word}\n"
        process.send_signal(signal.SIGTERM)
    status, _, errors = ended(process)
    messages = [line.rpartition("SIGTERM: ")[2] for line in errors.splitlines()]
    assert (status, messages) == (0, ["stopping", "already stopping"])


def test_ctrl_c_during_the_imports_ends_a_service_without_a_traceback() -> None:
    """The signal is sent during one of the last imports, the one of services.kvpool.settings."""
    body = """
import builtins, os, runpy, signal
importing = builtins.__import__

def interrupt(name, *rest, **named):
    if name == "services.kvpool.settings":
        os.kill(os.getpid(), signal.SIGINT)
    return importing(name, *rest, **named)

builtins.__import__ = interrupt
runpy.run_module("services.kvpool", run_name="__main__", alter_sys=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", body], stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(
    "body",
    [
        "run_service('thing', ServiceSettings, lambda settings, stop: fail(0))",
        """
async def serve(settings, stop):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail(0.01))
        await stop.wait()

run_service("thing", ServiceSettings, serve)
""",
        """
async def serve(settings, stop):
    async with asyncio.TaskGroup() as outer:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail(0.01))
            tasks.create_task(fail(0.01))
            await stop.wait()

run_service("thing", ServiceSettings, serve)
""",
    ],
    ids=["at the start", "in a task", "in several tasks"],
)
def test_an_error_ends_it_with_its_sentence(body: str) -> None:
    assert ended(start(body)) == (1, "", "stepwell thing: the model changed\n")


def test_a_setting_that_proves_wrong_while_the_service_is_built_ends_it_like_any_bad_setting() -> (
    None
):
    body = """
async def serve(settings, stop):
    raise SettingError("--rank is 3, but --tensor-parallel-size is 2")

run_service("thing", ServiceSettings, serve)
"""
    sentence = "stepwell thing: --rank is 3, but --tensor-parallel-size is 2\n"
    assert ended(start(body)) == (2, "", sentence)


def test_settings_are_read_and_logs_configured_before_it_serves() -> None:
    body = """
async def serve(settings, stop):
    import logging
    logging.getLogger("thing").info("listening on %s", settings.address)

run_service("thing", ServiceSettings, serve)
"""
    status, _, errors = ended(start(body, log_level="info"))
    assert status == 0
    assert errors.endswith(" info    thing: listening on 127.0.0.1:0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize(
    ("end", "status"),
    [("return", 0), ("end_at_once('the ranks are lost')", 1)],
    ids=["in its own time", "at once"],
)
def test_a_full_disk_under_the_log_changes_neither_the_end_nor_its_status(
    end: str, status: int
) -> None:
    body = f"""
async def serve(settings, stop):
    import logging
    logging.getLogger("thing").info("serving")
    await asyncio.sleep(0)
    {end}

run_service("thing", ServiceSettings, serve)
"""
    with Path("/dev/full").open("w") as full:
        assert ended(start(body, log_level="info", errors=full)) == (status, "", None)


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_lines_that_a_full_disk_did_not_take_are_counted_once_there_is_room(
    style: str, unbuffered: str, tmp_path: Path
) -> None:
    # A limit on the size of files, which has the same effect as a full disk.
    body = """
import logging, resource

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

async def serve(settings, stop):
    logger = logging.getLogger("thing")
    limit(2001)
    for number in range(100):
        logger.info("number %d", number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    limit(resource.RLIM_INFINITY)
    logger.info("room again")

run_service("thing", ServiceSettings, serve)
"""
    with (tmp_path / "log").open("w") as log:
        process = start(body, style, log_level="info", errors=log, unbuffered=unbuffered)
        assert ended(process) == (0, "", None)
    written = (tmp_path / "log").read_text().splitlines()
    *numbers, gap, last = written
    whole = [line for line in numbers if re.search(r"number \d+($|\"})", line)]
    assert 0 < len(numbers) - len(whole) <= 1, "the line at the limit is cut"
    num_lost = 100 - len(whole)
    assert f"{num_lost} lines before this one could not be written: File too large" in gap
    assert "room again" in last
    if style == "json":
        assert json.loads(gap)["level"] == "warning"


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_does_not_read_the_log_makes_no_service_wait(kind: str) -> None:
    body = """
import logging

async def serve(settings, stop):
    logger = logging.getLogger("thing")
    for number in range(20_000):
        logger.log(logging.WARNING if number % 1000 == 0 else logging.INFO, "number %d", number)
        if number % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    print("serving", flush=True)
    await stop.wait()

run_service("thing", ServiceSettings, serve)
"""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    os.set_blocking(reader, False)
    if kind == "terminal":
        tty.setraw(writer)
        termios.tcflow(writer, termios.TCOOFF)  # as Ctrl-S does
    with open(reader, "rb", buffering=0) as log, open(writer, "w") as errors:  # noqa: PTH123
        process = start(body, log_level="info", errors=errors)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        if kind == "terminal":
            termios.tcflow(writer, termios.TCOON)
        written = b"".join(iter(lambda: log.read(65_536), None))
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
        written += b"".join(iter(lambda: log.read(65_536), None))
    *numbers, gap, last = written.decode().splitlines()
    assert [line.rpartition(" ")[2] for line in numbers] == [str(n) for n in range(len(numbers))]
    num_lost = 20_000 - len(numbers)
    assert f"{num_lost} lines before this one could not be written: the reader" in gap
    assert "SIGTERM" in last


def test_garbage_is_collected_while_it_serves_but_not_searched_for_in_what_was_imported() -> None:
    body = """
import gc
gc.disable()

async def serve(settings, stop):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 10_000)

run_service("thing", ServiceSettings, serve)
"""
    assert ended(start(body)) == (0, "True True True\n", "")


def test_a_lookup_that_fails_after_its_connection_attempt_was_cancelled_is_not_logged() -> None:
    _, out, errors = ended(
        start("""
import gc
from contextlib import suppress

async def connect():
    with suppress(OSError):
        await asyncio.open_connection("no-such-host!", 1)

async def fail():
    raise LookupError("a task's own error is logged")

async def serve(settings, stop):
    for num_turns in range(20):  # one of them cancels while the name is being looked up
        attempt = asyncio.create_task(connect())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        attempt.cancel()
    await connect()  # is answered after those before
    task = asyncio.create_task(fail())
    await asyncio.sleep(0.1)
    del task
    gc.collect()
    print("end", flush=True)

run_service("thing", ServiceSettings, serve)
""")
    )
    assert out == "end\n"
    assert "gaierror" not in errors
    assert "Task exception was never retrieved" in errors
    assert "a task's own error is logged" in errors


def test_a_defect_ends_it_with_a_traceback() -> None:
    status, _, errors = ended(
        start("""
async def serve(settings, stop):
    raise KeyError("odd")

run_service("thing", ServiceSettings, serve)
""")
    )
    assert status == 1
    assert "KeyError: 'odd'" in errors
