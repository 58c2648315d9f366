"""The step log never blocks the scheduler. If it cannot be written, the log ends."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.telemetry.step_log import StepLog, create_log_file, header
from services.scheduler.core.config import SchedulerConfig
from tests.scheduler.fake_worker import FakeWorker


class SlowFile:
    """A file whose writes block until `going` is set."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.content = b""
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def write(self, content: bytes) -> int:
        assert self.going.wait(10)
        self.content += content
        return len(content)

    def flush(self) -> None:
        pass


def lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def test_what_is_written_lies_there_in_order_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path.open("wb"))
    for step in range(1000):
        log.write({"call": "schedule", "step": step})
    log.close()
    told = lines(path.read_bytes())
    assert [entry.get("step") for entry in told] == [*range(1000), None]
    assert told[-1] == {"call": "end"}


def test_when_the_disk_is_too_slow_the_log_is_given_up_and_stays_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    file = SlowFile()
    log = StepLog(file, max_waiting_bytes=100)  # type: ignore[arg-type]
    for step in range(50):
        log.write({"step": step})
    file.going.set()
    log.close()
    told = lines(file.content)
    assert 0 < len(told) < 50
    assert told == [{"step": step} for step in range(len(told))]
    assert [record.message for record in caplog.records] == [
        "the step log is incomplete, no further step is logged: the disk is too "
        "slow, and 100 bytes still wait to be written"
    ]
    assert file.is_closed


def test_a_compressed_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """All complete writes can be decompressed, even if the service is killed."""
    path = tmp_path / "steps.jsonl.zst"
    log = StepLog(create_log_file(path))
    written: list[dict[str, int]] = []
    for batch in range(3):
        written += [{"step": 10 * batch + number} for number in range(10)]
        for entry in written[-10:]:
            log.write(entry)
        deadline = time.monotonic() + 60
        while len(told := lines(decompressed(path))) < len(written):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told == written
    log.close()
    assert lines(decompressed(path)) == [*written, {"call": "end"}]


def decompressed(path: Path) -> bytes:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_when_the_disk_is_full_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    log = StepLog(Path("/dev/full").open("wb"))  # noqa: SIM115 - the log closes it
    log.write({"step": 0})
    log.close()
    assert [record.message for record in caplog.records] == [
        "the step log is incomplete, no further step is logged: No space left on device"
    ]


def test_the_header_tells_all_that_a_replay_needs() -> None:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=36,
        block_size=4,
        num_blocks=64,
        fingerprint=b"\x01\xff",
        policy="priority",
    )
    shape = ReplicaShape(FakeWorker().description, 64)
    first = header(config, shape, started_unix_nanos=17)
    assert json.loads(json.dumps(first)) == first
    assert (first["schema"], first["version"]) == ("stepwell.step_log", 4)
    assert (first["fingerprint"], first["started_unix_nanos"]) == ("01ff", 17)
    assert first["config"]["policy"] == "priority"
    assert "fingerprint" not in first["config"]
    assert first["pool"] == {
        "num_blocks": 64,
        "groups": [
            {
                "attention_type": "full",
                "block_size": 4,
                "window": 0,
                "num_layers": 2,
                "is_eagle_group": False,
                "mamba_cache_mode": "none",
                "num_speculative_blocks": 0,
            }
        ],
    }
