"""A policy that is not part of `services` runs in the simulator, in replays and in the server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.replay.settings import parse_override
from services.cli.simulate import main
from services.common.errors import InvalidArgument
from services.common.process.settings import SettingError, parse_settings
from services.gateway.settings import GatewaySettings
from services.scheduler.core.policies import POLICIES, find_policy
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.shortest_prompt_first import ShortestPromptFirstPolicy
from tests.simulation.laboratory.outside import LAST_REPLICA, SHORTEST
from tests.simulation.laboratory.test_simulate_command import SMALL

OUTSIDE = "tests.simulation.laboratory.outside"


def test_replay_and_server_accept_the_same_name() -> None:
    argv = ["--kvpool", "unix:pool", "--workers", "unix:worker", "--policy", SHORTEST]
    settings = parse_settings(SchedulerSettings, "scheduler", argv, {})
    assert issubclass(find_policy(settings.policy), ShortestPromptFirstPolicy)
    assert parse_override(f"policy={SHORTEST}") == ("policy", SHORTEST)
    gateway = ["--model", "models/demo", "--schedulers", "unix:s", "--routing-policy", LAST_REPLICA]
    assert parse_settings(GatewaySettings, "gateway", gateway, {}).routing_policy == LAST_REPLICA


def test_a_policy_of_a_file_in_the_current_directory_runs_in_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from services.scheduler.core.policies.fcfs import FCFSPolicy\n"
        "class Mine(FCFSPolicy):\n"
        "    def victim(self, running):\n"
        "        return next(iter(running))\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli", "simulate", *SMALL, "--no-optimum"),
            *("--policy", "mine:Mine", "--policy", "fcfs", "--json", "out.json"),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'gen'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["mine:Mine", "fcfs"]


def test_an_order_of_its_own_changes_the_times(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    crowd = ["--workload", "chat", "--programs", "60", "--rate", "20", "--max-num-seqs", "2"]
    policies = ["--policy", "fcfs", "--policy", SHORTEST, "--no-optimum"]
    assert main([*crowd, *policies, "--json", str(path)]) == 0
    fcfs, shortest = json.loads(path.read_text())["rows"]
    first = "first_turn_seconds_p50"
    assert shortest["time_to_first_token"][first] < fcfs["time_to_first_token"][first]


def test_a_routing_policy_of_its_own_chooses_the_replica(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    routings = ["--replicas", "3", "--routing", LAST_REPLICA, "--routing", "round-robin"]
    assert main([*SMALL, *routings, "--no-optimum", "--json", str(path)]) == 0
    last, turns = json.loads(path.read_text())["rows"]
    assert last["waste"]["wasted_cold"] == 0
    assert turns["waste"]["wasted_cold"] > 0


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere:Mine", "imported .No module named 'nowhere'."),
        ("tests.simulation.laboratory.outside:Mine", "imported .*'Mine'"),
        (LAST_REPLICA, "lacks uses_priority, create_request_queue, victim"),
    ],
)
def test_a_name_that_is_no_policy_is_one_sentence(name: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        find_policy(name)
    argv = ["--kvpool", "unix:pool", "--workers", "unix:worker", "--policy", name]
    with pytest.raises(SettingError, match=complaint):
        parse_settings(SchedulerSettings, "scheduler", argv, {})
    with pytest.raises(ValueError, match=complaint):
        parse_override(f"policy={name}")
    with pytest.raises(CommandError, match=complaint):
        main([*SMALL, "--policy", name])


@pytest.mark.parametrize("name", [*POLICIES, SHORTEST])
def test_good_policies_pass_the_kit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check-policy", name, "--programs", "12"]) == 0
    assert capsys.readouterr().out == f"{name}: 12 worlds, no problem\n"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("LosesRequests", "world 0 of seed 0: iterating over a queue of"),
        ("PreemptsNobodyThatRuns", "world 0 of seed 0: victim returned a request that"),
        ("Random", "world [0-9] of seed 0: victim returned different requests"),
    ],
)
def test_bad_policies_fail_the_kit(name: str, problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        main(["--check-policy", f"{OUTSIDE}:{name}", "--programs", "12"])
