"""The gateway as a separate process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.common.errors import FailedPrecondition, Unavailable
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.gateway_process import PYTHONPATH, line_with, process, run, serving_address
from tests.gateway.raw_http import post_head
from tests.gateway.serving import serving, until


def flags(model: Path, scheduler_address: str) -> list[str]:
    listen = ["--http-address", "127.0.0.1:0", "--address", "127.0.0.1:0"]
    return ["--model", str(model), "--schedulers", scheduler_address, *listen]


async def test_sigterm_finishes_what_runs_and_exits_0(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with scheduler.running() as address:
        with process(*flags(model, address), "--drain-delay-seconds", "2") as child:
            http_address = await asyncio.to_thread(serving_address, child)
            await asyncio.to_thread(line_with, child, "no API key is required: every client that")
            async with httpx.AsyncClient(base_url=f"http://{http_address}", timeout=60) as http:
                async with asyncio.timeout(60):
                    while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                body = {"prompt": "the", "max_tokens": 8}
                answer = asyncio.create_task(http.post("/v1/completions", json=body))
                await until(lambda: scheduler.num_running == 1)
                child.send_signal(signal.SIGTERM)
                await asyncio.to_thread(line_with, child, "stopping")
                scheduler.run_freely()
                assert (await answer).json()["usage"]["completion_tokens"] == 8
                # Clients that do not yet know of the drain are still served.
                assert (await http.get("/health")).status_code == 503
                late = await http.post("/v1/completions", json=body)
                assert late.json()["usage"]["completion_tokens"] == 8
                assert late.headers["connection"] == "close"
            assert await asyncio.to_thread(child.wait, 10) == 0


async def test_a_request_that_never_ends_is_ended(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with scheduler.running() as address:
        with process(*flags(model, address), "--drain-seconds", "0.5") as child:
            http_address = await asyncio.to_thread(serving_address, child)
            host, port = http_address.split(":")
            with socket.create_connection((host, int(port))) as unfinished:
                unfinished.sendall(post_head("/v1/completions", 99) + b"{")
                child.send_signal(signal.SIGTERM)
                _, log = await asyncio.to_thread(child.communicate, None, 10)
            assert child.returncode == 0, log
            assert "Traceback" not in log


def test_a_taken_port_is_one_sentence(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("--model", str(model), "--http-address", "127.0.0.1:0", "--address", address)
    assert ended.returncode == 1
    assert f"stepwell gateway: cannot listen on {address}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("setting", ["http_address", "admin_address", "metrics_address"])
async def test_an_http_address_that_cannot_be_bound_has_its_reason_and_leaves_nothing_open(
    model: Path, setting: str
) -> None:
    wrong = {"no-such-host!:1": "Name or service not known"}
    if setting == "admin_address":
        wrong["unix:/no/such/directory/s.sock"] = "No such file or directory"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong[f"127.0.0.1:{taken.getsockname()[1]}"] = "Address already in use"
        for address, reason in wrong.items():
            with pytest.raises(Unavailable) as refused:
                async with serving(
                    model, FakeScheduler(), admin_key="k" * 32, **{setting: address}
                ):
                    raise AssertionError
            assert address in refused.value.message
            assert refused.value.message.endswith(f": {reason}")


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    ended = run("--model", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.strip() == f"stepwell gateway: {tmp_path} has no tokenizer.json"


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        FailedPrecondition, match=r"/tokenizer\.json: cannot load the tokenizer: .+"
    ):
        load_tokenizer(tmp_path)


def test_no_torch_is_needed(model: Path) -> None:
    """The tokenizer loads without torch, and no log line says that torch is missing."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer\n"
        "import services.gateway.__main__\n"
        f"tokenizer = load_tokenizer(Path({str(model)!r}))\n"
        "print(tokenizer.decode([70, 71], skip_special_tokens=True))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
