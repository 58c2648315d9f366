"""`stepwell up`: starts a gateway and its replicas with one command."""

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from services.cli import DEFAULT_URL
from services.cli.console import Console, announce, shows_colour
from services.cli.errors import CommandError
from services.cli.processes.plan import Addresses, stages
from services.cli.processes.ports import claim_port
from services.cli.processes.replica_variables import check_variables
from services.cli.processes.run_directory import run_directory
from services.cli.processes.supervisor import Stage, StartFailed, Supervisor
from services.cli.settings import UpSettings
from services.common.model_source.find import model_name
from services.common.process.logs import LogFormat
from services.common.process.settings import SettingError, load_settings, variable_name
from services.common.process.standard_streams import drop_unwritten
from services.common.redis.connection import (
    FIRST_CALL_SECONDS,
    RedisConnection,
    RedisUnavailable,
)
from services.common.redis.url import missing_file, without_secrets
from services.common.request.tokenizer_files import has_tokenizer
from services.common.rpc.addresses import LARGEST_PORT, join_host_port
from services.worker.backends.choices import DeviceSetting
from services.worker.models.errors import ModelError
from services.worker.models.pooling_config import RunnerSetting
from services.worker.models.suitability.check import check_model

_STILL_STARTING_SECONDS = 5.0
_PROMPT = "def read_lines(path):"
_KEYS = ("api_keys", "api_key_file", "api_keys_in_redis")
"""Settings of the gateway, each of which makes API keys mandatory."""


def main(argv: Sequence[str]) -> int:
    """Runs until a signal arrives. Continues even if log lines cannot be written."""
    try:
        return _up(argv)
    finally:
        drop_unwritten(sys.stdout)


def _up(argv: Sequence[str]) -> int:
    settings = load_settings(UpSettings, "up", argv, prog="stepwell up")
    _check_model(settings)
    _check_replicas(settings)
    if settings.redis_url is not None:
        require_redis(settings.redis_url)
    http_port = claim_port(settings.host, settings.http_port, "--http-port")
    if settings.grpc_port == http_port:
        raise CommandError(f"--http-port and --grpc-port are both {http_port}")
    grpc_port = claim_port(settings.host, settings.grpc_port, "--grpc-port")
    vllm_grpc_ports = _vllm_grpc_ports(settings)
    admin_port = settings.admin_port
    if admin_port is not None:
        admin_port = claim_port("127.0.0.1", admin_port, "--admin-port")
    master_ports = tuple(
        claim_port("127.0.0.1", 0, "--tensor-parallel-size")
        for _ in range(settings.replicas if settings.num_ranks > 1 else 0)
    )
    with run_directory() as directory:
        addresses = Addresses(
            settings.host,
            http_port,
            grpc_port,
            directory,
            master_ports,
            vllm_grpc_ports,
            admin_port,
        )
        plan = stages(settings, addresses, {**os.environ, "PYTHONUNBUFFERED": "1"})
        console = Console(
            sys.stderr,
            colour=shows_colour(sys.stderr, os.environ),
            quiet=settings.quiet,
            raw=settings.log_format is LogFormat.JSON,
            name_width=max(len("scheduler"), *(len(s.name) for stage in plan for s in stage.specs)),
        )
        try:
            asyncio.run(_supervise(plan, settings, addresses, console))
        except StartFailed as failure:
            raise CommandError(_why(failure, console)) from failure
    console.note("everything has stopped")
    return 0


def _check_model(settings: UpSettings) -> None:
    """Raises CommandError before any service starts if the worker's checks reject the model."""
    runner = settings.runner or os.environ.get(variable_name("worker", "runner"))
    device = settings.device or os.environ.get(variable_name("worker", "device"))
    known = [each for each in RunnerSetting if each.value == runner]
    sizes = settings.tensor_parallel_size, settings.pipeline_parallel_size
    try:
        check_model(
            *(settings.model, *sizes, known[0] if known else RunnerSetting.AUTO),
            needs_weights=device != DeviceSetting.SIMULATED.value,
        )
    except ModelError as error:
        raise CommandError(str(error)) from error
    if not has_tokenizer(settings.model):
        raise CommandError(f"{settings.model} has no tokenizer.json")


def _vllm_grpc_ports(settings: UpSettings) -> tuple[int, ...]:
    """One port for each replica, from the requested port on. Empty if no port was requested."""
    first = settings.vllm_grpc_port
    if first is None:
        return ()
    if first + settings.replicas - 1 > LARGEST_PORT:
        raise CommandError(
            f"--vllm-grpc-port {first} leaves no port for each of {settings.replicas} replicas",
            exit_status=2,
        )
    return tuple(
        claim_port(settings.host, first + index if first else 0, "--vllm-grpc-port")
        for index in range(settings.replicas)
    )


async def _supervise(
    plan: Sequence[Stage], settings: UpSettings, addresses: Addresses, console: Console
) -> None:
    supervisor = Supervisor(plan, console)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A process that nohup has started must continue to ignore SIGHUP.
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
            loop.add_signal_handler(signum, _on_signal, supervisor, signum, console)
    console.note(f"starting {_services(settings)} for {settings.model}")
    if settings.ui is not False:
        scheme = "https" if _of_gateway("tls_cert_file", settings) else "http"
        console.note(f"the page with replicas and traces is at {scheme}://{addresses.http}/ui")
    if addresses.admin is not None:
        console.note(f"operators' calls will be at http://{addresses.admin}")
    for port in addresses.vllm_grpc_ports:
        where = join_host_port(addresses.host, port)
        console.note(f"vllm.grpc.engine will be at grpc://{where}")
    announcer = asyncio.create_task(_announce_ready(supervisor, settings, addresses, console))
    try:
        await supervisor.run()
    finally:
        announcer.cancel()


def _check_replicas(settings: UpSettings) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        if settings.replicas > 1 and getattr(settings, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise CommandError(
                f"{flag} is for a single replica, not {settings.replicas}", exit_status=2
            )
    check_variables(settings.replicas, os.environ)


def _services(settings: UpSettings) -> str:
    size = settings.num_ranks
    workers = "worker" if size == 1 else f"{size} workers"
    if settings.replicas == 1:
        return f"gateway, scheduler, kvpool and {workers}"
    return f"gateway and {settings.replicas} replicas of scheduler, kvpool and {workers}"


def _on_signal(supervisor: Supervisor, signum: int, console: Console) -> None:
    if supervisor.stop.is_set():
        console.warn(f"{signal.Signals(signum).name} again: killing what is left")
        supervisor.kill_now.set()
        return
    console.note(f"{signal.Signals(signum).name}: stopping; once more kills")
    supervisor.stop.set()


async def _announce_ready(
    supervisor: Supervisor, settings: UpSettings, addresses: Addresses, console: Console
) -> None:
    started = time.monotonic()
    while not supervisor.all_ready.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(supervisor.all_ready.wait(), _STILL_STARTING_SECONDS)
            break
        waited = time.monotonic() - started
        console.note(f"still waiting for {', '.join(supervisor.not_ready())} ({waited:.0f} s)")
    model = _of_gateway("served_model_name", settings) or model_name(settings.model)
    text = ready_text(
        addresses,
        model,
        needs_key=any(_of_gateway(name, settings) for name in _KEYS),
        has_tls=bool(_of_gateway("tls_cert_file", settings)),
        needs_certificate=bool(_of_gateway("tls_client_ca_file", settings)),
    )
    announce(text)


def _of_gateway(name: str, settings: UpSettings) -> Any:
    """The value of a forwarded setting, or of the gateway's own environment variable. The value may
    be the path of a file with the setting.
    """
    variable = variable_name("gateway", name)
    return getattr(settings, name) or os.environ.get(variable) or os.environ.get(f"{variable}_FILE")


def ready_text(
    addresses: Addresses,
    model: str,
    *,
    needs_key: bool,
    has_tls: bool = False,
    needs_certificate: bool = False,
) -> str:
    """The line `ready`, followed by a command to try. If the URL is not the default, a further line
    sets the environment variable from which commands read the URL.
    """
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 64, "stream": True})
    url = f"{'https' if has_tls else 'http'}://{addresses.http}"
    flags = (
        ("--cacert CA.pem ", has_tls),
        ("--cert CLIENT.pem --key CLIENT-KEY.pem ", needs_certificate),
        ("-H 'Authorization: Bearer KEY' ", needs_key),
    )
    export = "" if url == DEFAULT_URL else f"\n  export STEPWELL_URL={url}"
    return (
        f"ready: {model} at {url} (gRPC at {addresses.grpc}); try\n"
        f"  curl -N {url}/v1/completions {''.join(flag for flag, needed in flags if needed)}"
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}{export}"
    )


def _why(failure: StartFailed, console: Console) -> str:
    """Explains a failed start by the sentence with which the service ended. Without a sentence,
    writes the service's last lines, and returns its exit status.
    """
    beginning = f"stepwell {failure.name.partition('-')[0]}: "
    for line in reversed(failure.tail):
        if line.startswith(beginning):
            return f"{failure.name} cannot start: {line.removeprefix(beginning)}"
    console.tail(failure.name, failure.tail)
    return f"{failure.name} cannot start: {failure.status}"


def require_redis(url: str) -> None:
    """Raises CommandError if no Redis is reachable at a URL or if Redis rejects the password. The
    services themselves tolerate an unreachable Redis, which may become reachable later.
    """
    if (complaint := missing_file(url)) is not None:
        raise CommandError(f"--redis-url {without_secrets(url)}: {complaint}", exit_status=2)

    async def ask() -> None:
        connection = RedisConnection(url)
        try:
            await connection.call(lambda client: client.ping(), FIRST_CALL_SECONDS)
        finally:
            await connection.close()

    try:
        asyncio.run(ask())
    except SettingError as error:
        raise CommandError(str(error)) from error
    except RedisUnavailable as error:
        complaint = error.complaint or "no server answers at this address"
        raise CommandError(f"--redis-url {without_secrets(url)}: {complaint}") from error
