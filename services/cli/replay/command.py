"""`stepwell replay`: parses the arguments, replays a step log and prints the results."""

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from services.cli.errors import CommandError, CommandParser
from services.cli.replay.log_file import StepLogFile
from services.cli.replay.log_replay import Difference, LogReplay
from services.cli.replay.plot import draw
from services.cli.replay.settings import NAMES, parse_override
from services.cli.replay.step_records import Write
from services.cli.replay.table import comparison, summary
from services.cli.replay.what_if import changed_config, what_if

DESCRIPTION = """\
Drives the scheduler and the KV pool again, without a model or a network.

A step log (what the scheduler writes with --step-log) is replayed call by call, and must lead to
the same decisions, bit for bit: the exit status is 0 then, and 1 if a difference is shown.
"""
EPILOG = f"""\
With --set the arrivals of the log are scheduled with other settings. Time is counted in steps: a
request arrives, or is aborted, at the step at which it did, and has the tokens that it had in the
log. How long a step takes is not known. num_blocks stays what it was when block_size is changed, so
set both to keep the memory; max_model_len never exceeds the pool. Settings:
{", ".join(NAMES)}.
"""
_MAX_SHOWN = 400


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "replay",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="a step log")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="schedule the log's requests with this setting; may be given several times",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="draw the run; with --set, the run with these settings",
    )
    parser.add_argument(
        "--jsonl",
        type=Path,
        metavar="FILE",
        help="write records of steps, admissions and decisions; with --set, of the run with these "
        "settings",
    )
    arguments = parser.parse_args(argv)
    try:
        overrides = dict(map(parse_override, arguments.set))
    except ValueError as error:
        raise CommandError(str(error), exit_status=2) from None
    with suppress(OSError):
        if arguments.jsonl is not None and arguments.jsonl.samefile(arguments.file):
            raise CommandError("--jsonl would overwrite the step log itself", exit_status=2)
    with _record_file(arguments.jsonl) as write:
        return asyncio.run(_replay_log(arguments, overrides, write))


@contextmanager
def _record_file(path: Path | None) -> Iterator[Write | None]:
    if path is None:
        yield None
        return
    try:
        with path.open("w") as file:
            yield lambda record: print(json.dumps(record), file=file)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


async def _replay_log(
    arguments: argparse.Namespace, overrides: dict[str, Any], write: Write | None
) -> int:
    """Replays the log and prints the results. If the log is damaged, replays it up to the damage,
    and then raises CommandError.
    """
    path, plot = arguments.file, arguments.plot
    log = StepLogFile(path)
    config = changed_config(log.header.config, overrides)
    with log.naming(log.header_line):
        replay = LogReplay(log.header, None if overrides else write)
    damage: CommandError | None = None
    try:
        for line in log:
            with log.naming(line):
                differences = await replay.replay_entry(line.entry)
            if differences:
                for difference in differences:
                    print(_shown(difference))
                print(
                    f"{path} line {line.number}: from this call on, the replay differs from the log"
                )
                return 1
    except CommandError as error:
        if not replay.history.num_plans:
            raise
        damage = error
    print(f"{path}: {log.header.model_name}, {summary(replay.statistics)}")
    if damage is not None:
        print(f"no difference in the {replay.history.num_plans:,} steps before the damage")
    elif not replay.is_complete:
        where = "" if log.cut_line is None else f", within line {log.cut_line}"
        print(
            f"the log ends early{where}, after {replay.history.num_plans:,} steps: the service was "
            "killed, still writes the log, or its disk was full"
        )
    if damage is None:
        print("0 differences")
    run = replay.statistics
    if overrides:
        run = await what_if(replay.history, config, write)
        print()
        print(comparison(replay.statistics, run))
    if arguments.jsonl is not None:
        print(f"records written to {arguments.jsonl}")
    if plot is not None:
        what_if_text = f", what if {', '.join(arguments.set)}" if overrides else ""
        draw(run, f"{path.name}: {log.header.model_name}{what_if_text}", plot)
        print(f"drawn to {plot}")
    if damage is not None:
        raise damage
    return 0


def _shown(difference: Difference) -> str:
    logged, replayed = _short(difference.logged), _short(difference.replayed)
    return f"step {difference.step} {difference.field}\n  logged   {logged}\n  replayed {replayed}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
