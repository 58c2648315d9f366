"""`stepwell deploy check`: parses arguments, starts the containers and runs the check."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.cli.arguments import key
from services.cli.bench.argument_types import above_zero, count
from services.cli.deploy.changes import Rotation, Upgrade
from services.cli.deploy.check import Check, until_healthy
from services.cli.deploy.compose import KEY_FILE, Compose
from services.cli.deploy.engine import ComposeProject
from services.cli.deploy.faults import REPLICA, Break, Times
from services.cli.deploy.fleet import GatewayFleet
from services.cli.deploy.ports import Fault, Trial
from services.cli.errors import CommandError, CommandParser

DEFAULT_FILE = Path("deploy/compose/compose.yaml")
DEFAULT_ROLES = ("worker", "kvpool", "scheduler", REPLICA)


def main(argv: Sequence[str]) -> int:
    """Returns 0 if all streams continued and all containers recovered, else 1."""
    arguments = _parser().parse_args(argv)
    faults = [_fault(name) for name in arguments.faults.split(",") if name]
    project = ComposeProject(arguments.project_name)
    if project.containers() and not arguments.keep:
        raise CommandError(
            f"the project {arguments.project_name} already has containers, and the check would "
            "remove them and their volumes: name another --project-name, or give --keep",
            exit_status=2,
        )
    compose = Compose(
        arguments.file or [DEFAULT_FILE],
        arguments.project_name,
        KEY_FILE if arguments.rotate_key else {},
    )
    say = _clock()
    say(f"Docker engine {project.engine_version}, project {arguments.project_name}")
    try:
        api_key = compose.create_key() if arguments.rotate_key else arguments.api_key
        compose.up(build=arguments.build)
        containers = until_healthy(project, arguments.start_seconds)
        url = project.url()
        say(f"{len(containers)} containers are healthy; clients use {url}")
        fleet = GatewayFleet(
            url,
            api_key,
            num_streams=arguments.streams,
            max_tokens=arguments.max_tokens,
            stream_seconds=arguments.stream_seconds,
        )
        times = Times(arguments.hold_seconds, arguments.heal_seconds)
        trials: list[Trial] = [
            Break(project, fault, role, times)
            for fault in faults
            for role in arguments.roles.split(",")
        ]
        if arguments.rotate_key:
            trials.append(Rotation(project, compose, fleet, arguments.heal_seconds))
        if arguments.upgrade_to:
            (now, *_) = [one.tag for one in containers if one.role == "gateway"]
            trials.append(Upgrade(project, compose, arguments.upgrade_to))
            trials.append(Upgrade(project, compose, now, "roll back"))
        num_wrong = Check(project, fleet, arguments.heal_seconds, say).run(trials)
    finally:
        if not arguments.keep:
            compose.down()
    say("healed every time, and no stream failed" if not num_wrong else f"{num_wrong} times wrong")
    return 1 if num_wrong else 0


def _fault(name: str) -> Fault:
    try:
        return Fault(name)
    except ValueError:
        names = ", ".join(fault.value for fault in Fault)
        raise CommandError(f"--faults are of {names}, not {name!r}", exit_status=2) from None


def _clock() -> Callable[[str], None]:
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {line}", flush=True)

    return say


def _parser() -> CommandParser:
    parser = CommandParser(
        "deploy",
        description="Brings a compose file up, breaks or replaces its containers while streams "
        "run, and watches them heal.",
    )
    parser.add_argument("what", choices=("check",), metavar="check", help="the check")
    parser.add_argument(
        "--file",
        action="append",
        type=Path,
        metavar="PATH",
        help=f"compose file; may be given several times (default: {DEFAULT_FILE})",
    )
    parser.add_argument(
        "--project-name",
        default="stepwell-check",
        metavar="TEXT",
        help="compose project (default: stepwell-check)",
    )
    parser.add_argument("--build", action="store_true", help="build the images before")
    parser.add_argument(
        "--keep", action="store_true", help="leave the containers running at the end"
    )
    parser.add_argument(
        "--faults",
        default=",".join(fault.value for fault in Fault),
        metavar="A,B",
        help="how containers are broken, or empty (default: kill,pause,disconnect,stop)",
    )
    parser.add_argument(
        "--roles",
        default=",".join(DEFAULT_ROLES),
        metavar="A,B",
        help="which are broken: worker, kvpool, scheduler, replica (these three together), redis, "
        "gateway (default: the first four)",
    )
    parser.add_argument(
        "--rotate-key", action="store_true", help="replace and revoke the clients' API key too"
    )
    parser.add_argument(
        "--upgrade-to",
        metavar="TAG",
        help="replace all images by images of this tag too, and back; needs two-gateways.yaml",
    )
    parser.add_argument(
        "--api-key",
        type=key,
        default=os.environ.get("STEPWELL_API_KEY"),
        help="key to the gateway",
    )
    for name, kind, default, text in (
        ("streams", count, 4, "streams at once"),
        ("max-tokens", count, 800, "tokens of a stream, as far as the model lets"),
        ("hold-seconds", above_zero, 6.0, "how long a container stays paused or disconnected"),
        ("stream-seconds", above_zero, 300.0, "time for streams, which have failed after that"),
        ("start-seconds", above_zero, 300.0, "time for all containers to be healthy at first"),
        ("heal-seconds", above_zero, 120.0, "time for all containers to be healthy after a fault"),
    ):
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar="N" if kind is count else "X",
            help=f"{text} (default: {default:g})",
        )
    return parser
