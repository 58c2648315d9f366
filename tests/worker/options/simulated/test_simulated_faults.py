"""Scripts of faults, and their effects on a simulated worker."""

from pathlib import Path

import pytest

from services.common.process.settings import SettingError
from services.worker.backends.choices import DeviceSetting
from services.worker.backends.out_of_memory import NotEnoughMemory
from services.worker.build import build_worker
from services.worker.options.simulated.device import SimulatedDevice
from services.worker.options.simulated.faults import DeviceFault, Faults, read_rules
from services.worker.settings import WorkerSettings
from tests.worker.options.simulated.simulated_worker import (
    Clock,
    build,
    oracle_of,
    save_configuration,
)
from tests.worker.options.simulated.test_simulated_features import LIMITS, PROMPT, answer, request


class Run:
    """Runs steps of one second one after another, with a script of faults."""

    def __init__(self, script: str, rank: int = 0, replica: int = 0) -> None:
        clock = Clock()
        self.device = SimulatedDevice(clock.read, clock.sleep)
        self.ended: list[int] = []
        rules = read_rules(script, rank, replica)
        self.faults = Faults(rules, self.device, self.ended.append)

    def step(self) -> float | str:
        """Runs a step. Returns its time in seconds, or a text that describes its failure."""
        began = self.device.clock()
        self.device.begin_step()
        try:
            self.faults.at_step()
        except (DeviceFault, NotEnoughMemory) as error:
            return str(error)
        self.device.queue(1)
        self.device.wait_until(self.device.ends)
        return self.device.clock() - began

    def steps(self, count: int) -> list[float | str]:
        return [self.step() for _ in range(count)]


@pytest.mark.parametrize(
    ("script", "times"),
    [
        ("after 2 s: hang 5 s", [1, 1, 6, 1, 1]),
        ("after 0 s: hang 500 ms", [1.5, 1, 1, 1, 1]),
        ("every 3 s: hang 2 s", [1, 1, 1, 3, 3]),
        ("at step 2: hang 5 s; at step 4: hang 1 min", [1, 6, 1, 61, 1]),
        ("every 2nd step: hang 1 s", [1, 2, 1, 2, 1]),
        ("at step 2: slow 3x for 4 s", [1, 3, 3, 1, 1]),
        ("at step 1: slow 4x for 9 s; at step 2: hang 5 s", [4, 9, 1, 1, 1]),
        ("# comment\n\n  at step  2 :  slow 1.5x for 0.1 min  # another", [1, 1.5, 1.5, 1.5, 1.5]),
        ("rank 1 at step 1: hang 9 s; rank 0 at step 2: hang 1 s", [1, 2, 1, 1, 1]),
        ("replica 1 every 1st step: hang 9 s", [1, 1, 1, 1, 1]),
    ],
)
def test_a_script_changes_the_times_of_steps(script: str, times: list[float]) -> None:
    assert Run(script).steps(5) == times


def test_a_device_that_hangs_for_ever_never_ends_a_step() -> None:
    run = Run("at step 1: hang")
    run.device.begin_step()
    run.faults.at_step()
    run.device.queue(1)
    assert run.device.ends == float("inf")


def test_a_process_ends_with_the_status_of_the_script() -> None:
    run = Run("at step 2: exit 3; at step 3: exit")
    run.steps(3)
    assert run.ended == [3, 1]


def test_a_failed_step_is_one_sentence() -> None:
    run = Run("every 2nd step: fail; at step 3: refuse memory")
    assert run.steps(4) == [
        1,
        "device simulated: step 2: every 2nd step: fail",
        "device simulated: step 3: at step 3: refuse memory",
        "device simulated: step 4: every 2nd step: fail",
    ]


def test_a_script_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text("at step 1: hang 1 s  # once\nat step 2: hang 2 s\n")
    assert Run(str(path)).steps(3) == [2, 3, 1]
    with pytest.raises(
        SettingError, match="--device-faults nowhere: neither a rule such as 'after"
    ):
        read_rules("nowhere", 0, 0)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("after 30: hang 5 s", "'after 30' is not a time: it may be 'at start', 'after 30 s'"),
        ("at step 0: fail", "'at step 0' is not a time"),
        ("at step 1: fail; every 0 s: fail", "'every 0 s: fail': 0 s must be above 0"),
        ("at step 1: hang 5", "'hang 5' is not a fault: it may be 'hang', 'hang 5 s'"),
        ("at step 1: explode", "'explode' is not a fault"),
        ("at start: slow 3x for 1 s", "'slow' is not possible at start"),
        ("rank one at step 1: fail", "'rank one at step 1' is not a time"),
    ],
)
def test_a_wrong_rule_is_one_sentence(script: str, problem: str) -> None:
    with pytest.raises(SettingError, match=r"--device-faults '.*': ") as raised:
        read_rules(script, 0, 0)
    assert problem in str(raised.value)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_configuration(tmp_path)
    return tmp_path


def test_a_worker_whose_step_failed_answers_as_before(directory: Path) -> None:
    """The second step of the first answer fails. Then the worker drops all requests."""
    worker = build(directory, device_faults="at step 2: fail", **LIMITS)
    with pytest.raises(DeviceFault, match="step 2"):
        answer(worker, request(0), 3)
    assert answer(worker, request(0), 3) == oracle_of(worker).continuation(PROMPT, 3)


def test_a_worker_is_refused_memory_at_its_start(directory: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="the start: at start: refuse memory"):
        build(directory, device_faults="at start: refuse memory")


def test_faults_belong_to_the_simulated_device(directory: Path) -> None:
    wanted = WorkerSettings(
        model=directory, device=DeviceSetting.CPU, device_faults="at step 1: fail"
    )
    with pytest.raises(SettingError, match="--device-faults needs --device simulated"):
        build_worker(wanted, "w", lambda: None)
    with pytest.raises(SettingError, match="'explode' is not a fault"):
        build(directory, device_faults="at step 1: explode")
