"""`stepwell up` with settings that cannot work ends with an error of one sentence."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from services.cli.__main__ import main
from tests.hub_cache import in_hub_cache
from tests.redis_servers import needs_redis, redis_server

ROOT = Path(__file__).parents[3]
Up = Callable[..., tuple[int, str]]


@pytest.fixture
def model() -> Path:
    return ROOT / "models" / "demo"


def up_process(*arguments: str | Path, environ: Mapping[str, str]) -> tuple[int, str]:
    """Runs `stepwell up` as a process that ends. Returns its exit status and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "up", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def up(capfd: pytest.CaptureFixture[str]) -> Up:
    """Calls `stepwell up` in this process with arguments that it refuses. Returns its exit status
    and stderr.
    """

    def call(*arguments: str | Path) -> tuple[int, str]:
        try:
            status: int | str | None = main(["up", *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        output, error = capfd.readouterr()
        assert output == ""
        assert isinstance(status, int)
        return status, error

    return call


def test_the_model_must_be_given(up: Up) -> None:
    refused = (
        2,
        "stepwell up: --model (or STEPWELL_UP_MODEL) must be given: "
        "directory of the model in Hugging Face format, GGUF file, or name on the hub\n",
    )
    assert up() == up_process(environ={}) == refused


def test_a_missing_directory_is_refused(up: Up, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert up("--model", missing) == (2, f"stepwell up: --model: there is no directory {missing}\n")


def test_a_file_in_place_of_a_directory_is_refused(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert up("--model", file) == (
        2,
        f"stepwell up: --model: {file} is neither a directory nor a GGUF file\n",
    )


def test_a_directory_without_a_model_is_refused(up: Up, tmp_path: Path) -> None:
    assert up("--model", tmp_path) == (
        1,
        f"stepwell up: {tmp_path}/config.json: the file is missing\n",
    )


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(
    up: Up, model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    mamba = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (directory / "config.json").write_text(json.dumps(mamba))
    assert up("--model", directory) == (
        1,
        f"stepwell up: {directory}/config.json: MambaForCausalLM has no attention layer, and "
        "has no native code in Stepwell\n",
    )
    shutil.copy(model / "config.json", directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert up("--model", directory) == (
        1,
        f"stepwell up: {directory} has no tokenizer.json\n",
    )


def test_a_cached_model_of_the_hub_that_cannot_be_served_is_refused_without_torch(
    tmp_path: Path,
) -> None:
    """The import of torch would take longer than all checks."""
    directory = tmp_path / "model"
    directory.mkdir()
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (directory / "config.json").write_text(json.dumps(bloom))
    (directory / "model.safetensors").touch()
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')\n")
    environ = in_hub_cache(tmp_path / "hub", "Owner/Bloom", directory)
    environ |= {"PYTHONPATH": str(tmp_path)}
    status, error = up_process("--model", "Owner/Bloom", environ=environ)
    assert (status, error.count("\n")) == (1, 1)
    assert error.startswith(f"stepwell up: {tmp_path}/hub/models--Owner--Bloom/snapshots/")
    assert "BloomForCausalLM biases its attention by distance (ALiBi)" in error


def test_an_unknown_flag_is_refused(up: Up, model: Path) -> None:
    assert up("--model", model, "--port", "1") == (
        2,
        "stepwell up: unrecognized arguments: --port 1; similar are --http-port, --grpc-port\n",
    )


def test_a_bad_value_is_refused_with_its_flag(up: Up, model: Path) -> None:
    assert up("--model", model, "--http-port", "web") == (
        2,
        "stepwell up: --http-port must be a whole number, not 'web'\n",
    )
    assert up("--model", model, "--max-num-seqs", "0") == (
        2,
        "stepwell up: --max-num-seqs must be at least 1, not 0\n",
    )


@pytest.mark.parametrize(
    ("flag", "other"), [("--http-port", "--grpc-port"), ("--grpc-port", "--http-port")]
)
def test_a_taken_port_is_refused_with_its_flag(up: Up, model: Path, flag: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert up("--model", model, flag, str(port), other, "0") == (
            1,
            f"stepwell up: port {port} of 127.0.0.1 is taken; choose another one with {flag}\n",
        )


def test_one_port_for_http_and_grpc_is_refused(up: Up, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert up("--model", model, "--http-port", port, "--grpc-port", port) == (
        1,
        f"stepwell up: --http-port and --grpc-port are both {port}\n",
    )


@needs_redis
def test_a_redis_that_cannot_be_used(up: Up, model: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", "right") as server:
        place = f"127.0.0.1:{server.port}"
        for url in (f"redis://{place}", f"redis://:wrong@{place}"):
            status, error = up("--model", model, "--redis-url", url)
            assert status == 1
            assert error.startswith(
                f"stepwell up: --redis-url redis://{place}: Redis refuses user or password ("
            )
            assert error.count("\n") == 1
            assert "wrong" not in error
    assert up("--model", model, "--redis-url", server.url) == (
        1,
        f"stepwell up: --redis-url {server.url}: no server answers at this address\n",
    )
    assert up("--model", model, "--redis-url", "redis://no-such-host!:6379") == (
        1,
        "stepwell up: --redis-url redis://no-such-host!:6379: the host name does not exist\n",
    )
    assert up("--model", model, "--redis-url", "127.0.0.1:6379") == (
        2,
        "stepwell up: --redis-url must be redis://[user:password@]host:port, rediss://… for TLS, "
        "or unix://PATH\n",
    )


def test_an_address_of_another_machine(up: Up, model: Path) -> None:
    assert up("--model", model, "--host", "192.0.2.1") == (
        1,
        "stepwell up: --host 192.0.2.1 is not an address of this machine\n",
    )


def test_an_address_for_one_scheduler_and_two_replicas(up: Up, model: Path) -> None:
    flags = ("--kv-events-endpoint", "tcp://*:5557")
    assert up("--model", model, "--replicas", "2", *flags) == (
        2,
        "stepwell up: --kv-events-endpoint is for a single replica, not 2\n",
    )


def test_a_last_port_for_more_than_one_replica(up: Up, model: Path) -> None:
    ports = ("--http-port", "0", "--grpc-port", "0", "--vllm-grpc-port", "65535")
    assert up("--model", model, "--replicas", "2", *ports) == (
        2,
        "stepwell up: --vllm-grpc-port 65535 leaves no port for each of 2 replicas\n",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [("--model", "nothing"), ("--http-port", "web"), ("--port", "1")],
    ids=["model", "setting", "flag"],
)
def test_a_full_disk_under_the_log_does_not_change_the_status(
    arguments: tuple[str, ...], *, is_buffered: bool
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "up", *arguments],
            stdout=full,
            stderr=full,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"},
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
