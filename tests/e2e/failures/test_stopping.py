"""How `stepwell up` ends. tests/e2e/replicas/test_pipeline_parallel.py tests SIGTERM under load."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.stack import ROOT, Stack, wait_for
from tests.plain_http import http_get


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_under_its_log_changes_neither_its_work_nor_its_status(
    tiny_model: TinyModel,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    model = ("--model", str(tiny_model.directory), "--num-threads", "1")
    with Path("/dev/full").open("w") as full:
        up = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.cli", "up", *model),
                *("--http-port", port, "--grpc-port", "0"),
            ],
            stdout=full,
            stderr=full,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )

    def serves() -> bool:
        assert up.poll() is None
        try:
            health = http_get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            return False
        return health.status_code == httpx.codes.OK

    try:
        wait_for(serves)
        up.terminate()
        assert up.wait(30) == 0
    finally:
        up.kill()
        up.wait()


def test_nothing_outlives_a_killed_up(tiny_model: TinyModel, temporary: Path) -> None:
    stack = Stack(
        tiny_model.directory,
        *("--quiet", "--served-model-name", "other", "--api-keys", "first,second"),
        environ={"TMPDIR": str(temporary), "STEPWELL_WORKER_MAX_MODEL_LEN": "128"},
    )
    try:
        # With --quiet only the lines that show how to use the server are printed.
        assert [line.split()[0] for line in stack.output] == ["ready:", "curl", "export"]
        assert http_get(f"{stack.url}/v1/models").status_code == httpx.codes.UNAUTHORIZED
        key = {"Authorization": "Bearer second"}
        (model,) = http_get(f"{stack.url}/v1/models", headers=key).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("other", 128)

        pids = stack.pids()
        os.kill(stack.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(exists, pids.values())))
    finally:
        stack.close()


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_model_ends_the_start_with_its_file(
    tiny_model: TinyModel, tmp_path: Path, damage: str
) -> None:
    for file in tiny_model.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (tmp_path / damage).read_bytes()
    (tmp_path / damage).write_bytes(content[: len(content) // 2])

    with pytest.raises(AssertionError) as failure:
        Stack(tmp_path)

    last = str(failure.value).splitlines()[-1]
    assert last.startswith("stepwell up: ")
    assert damage in last
