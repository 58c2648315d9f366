"""Log lines are text or JSON, and contain the ids of the current trace and span."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.process.logs import LogFormat, LogLevel, configure_logs
from services.common.telemetry.tracing import configure_tracing


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restores the logging configuration after each test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_lines_carry_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("kvpool", LogLevel.INFO, LogFormat.JSON)
    logging.getLogger("services.kvpool").warning("%d blocks", 3, extra={"pool": "replica-0"})
    (line,) = map(json.loads, lines(capsys))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "service": "kvpool",
        "logger": "services.kvpool",
        "message": "3 blocks",
        "pool": "replica-0",
    }


def test_json_lines_carry_exceptions_and_anything_printable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("kvpool", LogLevel.INFO, LogFormat.JSON)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("x").exception("two\nlines", extra={"what": {1, 2}.__class__})
    (line,) = map(json.loads, lines(capsys))
    assert line["message"] == "two\nlines"
    assert line["exception"].endswith("ValueError: odd")
    assert "set" in line["what"]


def test_text_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("scheduler", LogLevel.INFO, LogFormat.TEXT)
    logging.getLogger("x").info("serving", extra={"address": "a:1"})
    (line,) = lines(capsys)
    assert line[8:] == " info    scheduler: serving address=a:1"


def test_what_is_less_severe_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("scheduler", LogLevel.WARNING, LogFormat.TEXT)
    logging.getLogger("x").info("no")
    logging.getLogger("x").error("yes")
    (line,) = lines(capsys)
    assert "yes" in line


@pytest.mark.parametrize("style", LogFormat)
def test_a_line_names_its_trace(capsys: pytest.CaptureFixture[str], style: LogFormat) -> None:
    configure_logs("scheduler", LogLevel.INFO, style)
    tracing = configure_tracing("scheduler", "", 1.0, exporter=InMemorySpanExporter())
    span = tracing.start("step")
    with trace.use_span(span, end_on_exit=True):
        logging.getLogger("x").info("here")
    logging.getLogger("x").info("there")
    here, there = lines(capsys)
    assert trace.format_trace_id(span.get_span_context().trace_id) in here
    assert trace.format_span_id(span.get_span_context().span_id) in here
    assert "trace_id" not in there
    tracing.shutdown()


async def test_lines_of_one_turn_of_the_event_loop_are_written_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("gateway", LogLevel.INFO, LogFormat.TEXT)
    logger = logging.getLogger("x")
    logger.info("first")
    logger.info("second")
    assert lines(capsys) == []
    await asyncio.sleep(0)
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == ["first", "second"]
    logger.info("third")
    await asyncio.sleep(0)
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == ["third"]


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING, logging.ERROR])
async def test_a_line_of_another_level_is_written_at_once_after_those_before_it(
    capsys: pytest.CaptureFixture[str], level: int
) -> None:
    configure_logs("gateway", LogLevel.DEBUG, LogFormat.TEXT)
    logger = logging.getLogger("x")
    logger.info("before")
    logger.log(level, "late")
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == ["before", "late"]
    logger.info("after")
    await asyncio.to_thread(logger.info, "elsewhere")
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == ["after", "elsewhere"]


def test_lines_of_a_loop_that_has_ended_are_written_with_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("gateway", LogLevel.INFO, LogFormat.TEXT)
    loop = asyncio.new_event_loop()

    async def log_last() -> None:
        loop.stop()
        logging.getLogger("x").info("last")

    task = loop.create_task(log_last())
    loop.run_forever()
    assert task.done()
    loop.close()
    logging.shutdown()
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == ["last"]


def test_a_client_that_leaves_while_it_is_answered_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("scheduler", LogLevel.INFO, LogFormat.TEXT)
    grpcs = logging.getLogger(cygrpc.__name__)
    for error in (cygrpc.ExecuteBatchError("a write"), cygrpc.UsageError("a defect")):
        try:
            raise error
        except cygrpc.BaseError:
            grpcs.exception("raised by servicer method")
    assert [line.split(" ", 1)[1] for line in lines(capsys) if "raised" in line] == [
        "error   scheduler: raised by servicer method"
    ]
