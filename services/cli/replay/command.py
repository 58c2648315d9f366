"""The command: its arguments and its output."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from services.cli.errors import CommandError
from services.cli.replay.fields import FieldError, line_of, parse_json
from services.cli.replay.log_file import StepLogFile, is_step_log
from services.cli.replay.log_replay import Difference, LogReplay
from services.cli.replay.plot import draw
from services.cli.replay.scenario import read_scenario
from services.cli.replay.scenario_run import run_scenario
from services.cli.replay.settings import NAMES, parse_override
from services.cli.replay.table import comparison, summary
from services.cli.replay.what_if import changed_config, what_if

DESCRIPTION = """\
Drives the scheduler and the KV pool again, without a model or a network.

A scenario (JSON: a configuration, and the requests that arrive and end at each step) is run with a
deterministic function in place of the model; the record of all decisions is printed as JSON.

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message, exit_status=2)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    parser = _Parser(
        prog="stepwell replay",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="a scenario or a step log")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what would have happened with this setting; may be given several times",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw the run, with --set the one that was not"
    )
    arguments = parser.parse_args(argv)
    _overrides(arguments.set)
    if is_step_log(arguments.file):
        return asyncio.run(_replay_log(arguments.file, arguments.set, arguments.plot))
    if arguments.set or arguments.plot:
        raise CommandError(f"{arguments.file} is a scenario: --set and --plot are for step logs")
    return _replay_scenario(arguments.file)


def _overrides(texts: Sequence[str]) -> dict[str, Any]:
    try:
        return dict(map(parse_override, texts))
    except ValueError as error:
        raise CommandError(str(error), exit_status=2) from None


def _replay_scenario(path: Path) -> int:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{path} line {line} is not UTF-8 text") from None
    try:
        scenario = read_scenario(parse_json(text))
    except json.JSONDecodeError as error:
        raise CommandError(
            f"{path} line {error.lineno} is not JSON: {error.msg} at column {error.colno}"
        ) from None
    except FieldError as error:
        raise CommandError(f"{path} line {line_of(text, error.path)}: {error}") from None
    except ValueError as error:
        raise CommandError(f"{path} line 1 is not usable: {error}") from None
    print(json.dumps(asyncio.run(run_scenario(scenario)), separators=(",", ":")))
    return 0


async def _replay_log(path: Path, texts: Sequence[str], plot: Path | None) -> int:
    log, overrides = StepLogFile(path), _overrides(texts)
    config = changed_config(log.header.config, overrides)
    with log.naming(log.header_line):
        replay = LogReplay(log.header)
    for line in log:
        with log.naming(line):
            differences = await replay.replay_entry(line.entry)
        if differences:
            for difference in differences:
                print(_shown(difference))
            print(f"{path} line {line.number}: the replay left the log here")
            return 1
    print(f"{path}: {log.header.model_name}, {summary(replay.statistics)}")
    if not replay.is_complete:
        where = "" if log.cut_line is None else f", within line {log.cut_line}"
        print(
            f"the log ends early{where}, after {replay.history.num_plans:,} steps: the service was "
            "killed, still writes it, or its disk was full"
        )
    print("0 differences")
    run = replay.statistics
    if overrides:
        run = await what_if(replay.history, config)
        print()
        print(comparison(replay.statistics, run))
    if plot is not None:
        draw(run, _title(path, log.header.model_name, texts), plot)
        print(f"drawn to {plot}")
    return 0


def _title(path: Path, model_name: str, settings: Sequence[str]) -> str:
    what_if = f", what if {', '.join(settings)}" if settings else ""
    return f"{path.name}: {model_name}{what_if}"


def _shown(difference: Difference) -> str:
    logged, replayed = _short(difference.logged), _short(difference.replayed)
    return f"step {difference.step} {difference.field}\n  logged   {logged}\n  replayed {replayed}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
