"""Converts the requests of a step log to programs (the work of simulated clients), with the logged
times and output lengths.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from services.cli.replay.log_file import StepLogFile
from services.simulation.laboratory.programs import Program, Turn


def read_step_log(path: Path) -> list[Program]:
    """One program for each logged request with output, in the order of arrival, with the logged
    prompt. Omits requests whose input arrives in several chunks (sessions). Raises CommandError.
    """
    added: dict[int, dict[str, Any]] = {}
    plans: dict[int, list[int]] = {}
    num_output: Counter[int] = Counter()
    for line in StepLogFile(path):
        entry = line.entry.value
        match entry.get("call"):
            case "add" if not entry.get("resumable"):
                added[entry["key"]] = entry
            case "schedule" if "lost_after" not in entry:
                plans[entry["step"]] = entry["keys"]
            case "update_from_output":
                for key, tokens in zip(plans.pop(entry["step"]), entry["token_ids"], strict=True):
                    num_output[key] += len(tokens)
    first = min((entry["arrival_time"] for entry in added.values()), default=0.0)
    programs = []
    for key, entry in added.items():
        num_prompt = entry["num_prompt_tokens"]
        runs = tuple((token, 1) for token in entry["tokens"][:num_prompt])
        if num_output[key]:
            turn = Turn(num_prompt, num_output[key], runs=runs)
            arrival = entry["arrival_time"] - first
            programs.append(Program(key, arrival, (turn,), priority=entry["priority"]))
    return sorted(programs, key=lambda program: program.arrival_seconds)
