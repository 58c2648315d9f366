"""The programs of benchmarks.soak run, each for some seconds."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import COMMANDS, main
from tests.benchmarks.programs import run_program
from tests.structured_forms import CHOOSE, PERSON, TREE


@pytest.mark.slow
def test_a_short_endurance_run_sends_every_kind_and_finds_all_blocks_free(
    servable_model: Path,
) -> None:
    # At the beginning of a run the memory of every process grows.
    flags = ("--minutes", 0.035, "--model", servable_model, "--growth-mb-per-hour", 100_000)
    report = run_program("soak", "endurance", *flags).stdout
    for process in ("gateway", "scheduler", "kvpool", "worker"):
        assert f"| {process} | " in report
    assert ", 0 went wrong; " in report
    assert "at the end all blocks are free and no request is left" in report
    assert " 0 preemptions" not in report


@pytest.mark.slow
def test_streams_of_two_gateways_outlive_faults_every_second(servable_model: Path) -> None:
    storm = ("--every", 1, "--seconds", 2.5, "--replicas", 1, "--gateways", 2)
    streams = ("--streams", 4, "--tokens", 40, "--model", servable_model)
    report = run_program("soak", "faults", *storm, *streams).stdout
    assert "3 faults; " in report
    assert " 0 failed, 0 changed, 0 ended because their gateway ended" in report
    assert "at the end all blocks are free and no request is left" in report


def test_idle_services_keep_their_cache(servable_model: Path) -> None:
    flags = ("--minutes", 0.03, "--programs", 8, "--model", servable_model)
    done = run_program("soak", "idle", *flags)
    assert "the same answer; 8 of 8 programs found their contexts; 0 warnings" in done.stdout


def test_contexts_of_programs_outlast_idle_time() -> None:
    done = run_program("soak", "day", "--hours", 0.02, "--programs", 8)
    assert "8 of 8 programs found their contexts; " in done.stdout


@pytest.mark.slow
def test_a_short_overload_is_served_and_refused(servable_model: Path) -> None:
    flags = ("--seconds", 0.5, "--concurrency", 4, "--deadline-seconds", 1)
    report = run_program("soak", "overload", *flags, "--model", servable_model).stdout
    assert "| goodput to capacity | " in report
    assert "| refusals, ms, median / p99 | " in report


@pytest.mark.slow
def test_a_short_flood_of_one_tenant_is_measured_from_both_sides(servable_model: Path) -> None:
    """The exit status may be 1, because a short run on a busy machine may miss its goals."""
    load = ("--tenants", 2, "--concurrency", 8, "--factor", 10, "--output-tokens", 32)
    times = ("--seconds", 0.5, "--deadline-seconds", 2, "--recovery-seconds", 0.2)
    program = (*load, *times, "--model", servable_model)
    done = run_program("soak", "overload", *program, statuses=(0, 1))
    tails = ("its p99 to the unloaded one", "its p99 to that while the flood is sent elsewhere")
    for line in ("goodput to peak", "refusals, ms", *tails, "memory of the"):
        assert f"| {line}" in done.stdout, done.stdout + done.stderr
    figures = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", done.stdout, re.MULTILINE))
    for tenant in ("flooding", "quiet"):
        num_sent, num_done = figures[f"{tenant} tenant: requests sent / done"].split(" / ")
        assert int(num_sent) >= int(num_done) > 0
    assert float(figures["refusals, ms, median / p99"].partition(" / ")[0]) > 0


@pytest.mark.slow
def test_answers_to_a_few_schemas_are_judged_through_a_kill(tmp_path: Path) -> None:
    for number, schema in enumerate([PERSON, TREE, CHOOSE, {"not": {"type": "string"}}]):
        (tmp_path / f"{number}.json").write_text(json.dumps(schema))
    load = ("--schemas", tmp_path, "--kills", 1, "--at-once", 2, "--max-tokens", 200)
    report = run_program("soak", "schemas", *load).stdout
    figures = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|", report, re.MULTILINE))
    assert figures["finished and not valid"] == figures["failed"] == "0"
    assert figures["refused by name"] == "1"
    ended = ("finished and valid", "incomplete at the limit of tokens")
    assert sum(int(figures[name]) for name in ended) == 3
    assert int(figures["finished and valid"]) > 0


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sleep"]) == 2
    assert "there is no command 'sleep'" in capsys.readouterr().err
