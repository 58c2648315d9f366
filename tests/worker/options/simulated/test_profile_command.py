"""`stepwell profile`: the fit of step times, and the measurement of a simulated device."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.errors import CommandError
from services.cli.profile.command import main
from services.cli.profile.fit import Measurement, fit_times, least_squares
from services.worker.backends.arrays import Int32Array
from services.worker.core.step_times import StepCosts, StepTimes
from services.worker.profiles.profile import MeasuredProfile, read_profile
from tests.worker.options.simulated.simulated_worker import save_configuration, save_profile

TIMES = StepTimes(
    StepCosts(seconds=0.001, seconds_per_decoded_context=2e-8, seconds_per_request=3e-5),
    StepCosts(
        seconds=0.002,
        seconds_per_token=1e-4,
        seconds_per_new_context=5e-8,
        seconds_per_decoded_context=2e-8,
    ),
)


def step(random: np.random.Generator, *, has_chunk: bool) -> tuple[Int32Array, Int32Array]:
    counts = np.ones(random.integers(1, 30), np.int32)
    if has_chunk:
        counts[0] = random.integers(2, 500)
    return counts, random.integers(0, 2000, len(counts), np.int32)


def test_the_coefficients_of_exact_times_are_found() -> None:
    random = np.random.default_rng(1)
    steps = [step(random, has_chunk=bool(number % 2)) for number in range(200)]
    fit = fit_times([Measurement(*one, TIMES.seconds(*one)) for one in steps])
    for one in steps:
        assert fit.times.seconds(*one) == pytest.approx(TIMES.seconds(*one), rel=1e-6)
    assert fit.mixed.p90 < 1e-6
    assert fit.times.mixed.seconds_per_new_context == pytest.approx(5e-8)


def test_a_jump_of_the_times_is_followed() -> None:
    def seconds(counts: Int32Array) -> float:
        num_tokens = int(counts.sum())
        return 0.0005 + num_tokens * (1e-5 if num_tokens > 28 else 6e-5)

    random = np.random.default_rng(1)
    steps = [step(random, has_chunk=bool(number % 2)) for number in range(600)]
    fit = fit_times([Measurement(*one, seconds(one[0])) for one in steps])
    assert fit.mixed.median < 0.005
    assert fit.decode.median < 0.1


@given(st.integers(0, 2**32 - 1))
def test_least_squares_are_least(seed: int) -> None:
    """The fit fulfils the Karush-Kuhn-Tucker conditions: no change of a coefficient improves it."""
    random = np.random.default_rng(seed)
    rows, targets = random.normal(size=(30, 6)), random.normal(size=30)
    found = least_squares(rows, targets)
    gains = rows.T @ (targets - rows @ found)
    assert (found >= 0).all()
    assert (gains < 1e-6).all()
    assert abs(gains[found > 0]).max(initial=0) < 1e-6


def test_no_coefficient_is_negative() -> None:
    steps = [
        Measurement(np.array([1], np.int32), np.array([context], np.int32), 1 - context / 1000)
        for context in range(100)
    ]
    steps += [Measurement(np.array([2], np.int32), np.array([0], np.int32), 1.0)] * 100
    costs = fit_times(steps).times.decode
    assert costs.seconds_per_decoded_context == 0
    assert 0.9 < costs.without_contexts(1, 1) < 1


def test_a_profile_that_is_measured_again_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured worker has a simulated device, whose steps take 2 to 30 ms."""
    save_configuration(tmp_path)
    text = """
    kv_cache_memory_bytes = 4_000_000
    [mixed]
    seconds = 0.004
    seconds_per_token = 1e-4
    [decode]
    seconds = 0.003
    seconds_per_request = 2e-4
    """
    for name, value in {
        "DEVICE": "simulated",
        "PROFILE": save_profile(tmp_path, text),
        "MAX_NUM_SEQS": "16",
        "MAX_NUM_BATCHED_TOKENS": "128",
        "NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(f"STEPWELL_WORKER_{name}", value)
    output = tmp_path / "measured.toml"
    flags = ["--model", str(tmp_path), "--steps", "200", "--seconds", "0"]
    assert main([*flags, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("decode: median ")
    profile = read_profile(str(output))
    assert isinstance(profile, MeasuredProfile)
    own = read_profile(save_profile(tmp_path, text))
    assert isinstance(own, MeasuredProfile)
    counts, computed = np.array([1] * 8, np.int32), np.array([50] * 8, np.int32)
    for _ in range(2):
        expected = own.times.seconds(counts, computed)
        assert profile.times.seconds(counts, computed) == pytest.approx(expected, rel=0.3)
        counts[0] = 60


def test_a_worker_that_cannot_start_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_configuration(tmp_path)
    monkeypatch.setenv("STEPWELL_WORKER_DEVICE", "simulated")
    with pytest.raises(CommandError, match="--device simulated needs --profile"):
        main(["--model", str(tmp_path)])
