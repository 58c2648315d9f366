"""The environment variables that a service sets for gRPC's native core."""

import os
import subprocess
import sys

from services.common.rpc.grpc_core import (
    EXPERIMENTS,
    FORK_SUPPORT,
    OLDER_POLLER,
    VERBOSITY,
    silence_grpc,
    tune_grpc,
)

SPAWN_BESIDE_A_CHANNEL = """
import services
import asyncio, grpc, uvloop

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        await (await asyncio.create_subprocess_exec("true")).wait()
    await server.stop(None)

uvloop.run(main())
"""


def test_defaults_are_set_where_the_environment_has_none() -> None:
    environ: dict[str, str] = {}
    tune_grpc(environ)
    assert environ == {EXPERIMENTS: OLDER_POLLER, FORK_SUPPORT: "0", VERBOSITY: "ERROR"}
    silence_grpc(environ)
    assert environ[VERBOSITY] == "NONE"


def test_the_environment_overrides_the_defaults() -> None:
    environ = {EXPERIMENTS: "", FORK_SUPPORT: "1", VERBOSITY: "DEBUG"}
    expected = dict(environ)
    tune_grpc(environ)
    silence_grpc(environ)
    assert environ == expected


def run(script: str) -> subprocess.CompletedProcess[str]:
    ours = (EXPERIMENTS, FORK_SUPPORT, VERBOSITY)
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, timeout=60
    )


def test_they_are_set_before_grpc_is_imported() -> None:
    done = run(
        "import os, sys, services; assert 'grpc' not in sys.modules; "
        f"print(os.environ['{EXPERIMENTS}'])"
    )
    assert done.stdout.strip() == OLDER_POLLER


def test_starting_a_process_beside_an_open_channel_logs_nothing() -> None:
    assert run(SPAWN_BESIDE_A_CHANNEL).stderr == ""


def test_stepwell_up_silences_grpc_before_it_is_imported() -> None:
    script = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'grpc' and os.environ.get('{VERBOSITY}') != 'NONE':\n"
        "            raise AssertionError('grpc is imported first')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from services.cli.__main__ import main\n"
        "try:\n"
        "    main(['up', '--help'])\n"
        "finally:\n"
        "    print('grpc' in sys.modules)\n"
    )
    done = run(script)
    assert done.stdout.splitlines()[-1] == "True"
