"""The programs of benchmarks.soak run, each for some seconds."""

from pathlib import Path

import pytest

from benchmarks.soak.__main__ import COMMANDS, main
from tests.benchmarks.programs import run_program


@pytest.mark.slow
def test_a_short_endurance_run_sends_every_kind_and_finds_all_blocks_free(
    servable_model: Path,
) -> None:
    # In so short a time the memory of every process still grows.
    flags = ("--minutes", 0.08, "--model", servable_model, "--growth-mb-per-hour", 100_000)
    report = run_program("soak", "endurance", *flags).stdout
    for process in ("gateway", "scheduler", "kvpool", "worker"):
        assert f"| {process} | " in report
    assert ", 0 went wrong; " in report
    assert "at the end all blocks are free and no request is left" in report
    assert " 0 preemptions" not in report


def test_idle_services_keep_their_cache(servable_model: Path) -> None:
    done = run_program("soak", "idle", "--minutes", 0.03, "--model", servable_model)
    assert "the same answer; 0 warnings" in done.stdout


@pytest.mark.slow
def test_a_short_overload_is_served_and_refused(servable_model: Path) -> None:
    flags = ("--seconds", 2, "--concurrency", 4, "--deadline-seconds", 1)
    report = run_program("soak", "overload", *flags, "--model", servable_model).stdout
    assert "| goodput to capacity | " in report
    assert "| refusals, ms, median / p99 | " in report


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sleep"]) == 2
    assert "there is no command 'sleep'" in capsys.readouterr().err
