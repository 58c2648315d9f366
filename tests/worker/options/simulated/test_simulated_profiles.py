"""Profiles of simulated devices, step times that follow from them, and refused settings."""

import time
from pathlib import Path
from typing import Any

import pytest

from services.common.process.settings import SettingError
from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import DeviceSetting
from services.worker.build import build_worker
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.step import StepInput
from services.worker.core.step_times import (
    NO_SERVING,
    ServingCosts,
    StepCosts,
    StepTimes,
    curve_value,
)
from services.worker.models.errors import UnsupportedModel
from services.worker.options.simulated.runner import TimedOutput, TimedRunner
from services.worker.profiles.profile import (
    ComputedProfile,
    MeasuredProfile,
    ModelSize,
    profile_names,
    read_profile,
)
from services.worker.settings import WorkerSettings
from tests.worker.options.simulated.simulated_worker import (
    Clock,
    build,
    save_configuration,
    save_profile,
    simulated,
    timed_model,
)
from tests.worker.runner_driver import ints
from tests.worker.step_story import new, step

COSTS = StepCosts(
    seconds=1000,
    seconds_per_token=100,
    seconds_per_new_context=10,
    seconds_per_decoded_context=2,
    seconds_per_request=0.5,
    seconds_by_tokens=((2, 10_000), (6, 50_000)),
)
TIMES = StepTimes(StepCosts(seconds=7, seconds_per_request=1), COSTS)


def test_the_time_of_a_step_is_the_sum_of_the_formula() -> None:
    """A chunk of three tokens after two attends to 3 + 4 + 5 tokens, and a decode to nine."""
    expected = 1000 + 4 * 100 + (3 + 4 + 5) * 10 + 9 * 2 + 2 * 0.5 + 30_000
    assert TIMES.seconds(ints(3, 1), ints(2, 8)) == expected


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (((2, 4.0), (4, 6.0), (8, 6.0)), [4, 4, 5, 6, 6, 6]),
        (((2, 4.0), (4, 6.0)), [4, 4, 5, 6, 7, 11]),
        (((2, 4.0), (4, 1.0)), [4, 4, 2.5, 1, 0, 0]),
        (((3, 4.0),), [4, 4, 4, 4, 4, 4]),
    ],
)
def test_times_by_tokens_are_a_curve(
    points: tuple[tuple[int, float], ...], expected: list[float]
) -> None:
    times = StepTimes(COSTS, StepCosts(seconds_by_tokens=points))
    assert [curve_value(points, size) for size in (1, 2, 3, 4, 5, 9)] == expected
    assert times.seconds(ints(9), ints(0)) == expected[-1]


def test_a_profile_may_have_serving_costs_which_its_device_ignores(tmp_path: Path) -> None:
    text = "kv_cache_memory_bytes = 1\n[mixed]\nseconds = 1\n"
    profile = read_profile(
        save_profile(
            tmp_path,
            f"{text}[serving]\nseconds_by_requests = [[1, 2], [4, 5]]\nseconds_per_new_request = 3",
        )
    )
    assert isinstance(profile, MeasuredProfile)
    assert profile.serving == ServingCosts(
        seconds_by_requests=((1, 2.0), (4, 5.0)), seconds_per_new_request=3
    )
    assert profile.step_times(SIZE).seconds(ints(1), ints(0)) == 1
    assert read_profile(save_profile(tmp_path, text)).serving == NO_SERVING  # type: ignore[union-attr]


def test_a_profile_may_have_a_curve(tmp_path: Path) -> None:
    text = "kv_cache_memory_bytes = 1\n[mixed]\nseconds_by_tokens = [[1, 5], [3, 9.5]]"
    profile = read_profile(save_profile(tmp_path, text))
    assert isinstance(profile, MeasuredProfile)
    assert profile.times.mixed == profile.times.decode
    assert profile.times.mixed.seconds_by_tokens == ((1, 5.0), (3, 9.5))


def test_steps_of_single_tokens_have_their_own_costs() -> None:
    assert TIMES.seconds(ints(1, 1, 1), ints(0, 5, 8)) == 7 + 3
    assert TIMES.seconds(ints(), ints()) == 0


def timed(directory: Path, text: str, **settings: Any) -> tuple[TimedRunner, Clock]:
    """A worker whose profile is `text`. Its clock advances only by the simulated times."""
    text = f"kv_cache_memory_bytes = 1_000_000\n{text}"
    worker = simulated(
        directory, profile=save_profile(directory, text), max_model_len=96, **settings
    )
    assert isinstance(worker.runner, TimedRunner)
    clock = Clock()
    worker.runner.device.clock, worker.runner.device.sleep = clock.read, clock.sleep
    return worker.runner, clock


PROMPT = step(0, (0, 5, 0), new_requests=(new(0, SamplingParams()),))


@pytest.mark.parametrize("delay", [0.0, 7.0])
def test_a_step_that_is_queued_in_time_starts_when_the_step_before_it_ends(
    tmp_path: Path, delay: float
) -> None:
    """The prompt's step takes ten seconds, and the decode step eight. The decode step is queued at
    the same time as the prompt's step, or seven seconds later.
    """
    runner, clock = timed(tmp_path, "[mixed]\nseconds = 10\n[decode]\nseconds = 8")
    flying = [runner.begin(PROMPT)]
    clock.now += delay
    flying.append(runner.begin(step(1, (0, 1, 5))))
    ended, waited = [], []
    for output in flying:
        assert isinstance(output, TimedOutput)
        waited.append(output.wait().waited_nanos / 1e9)
        ended.append(clock.now)
    assert ended == [10, 18]
    assert waited == [0, 10 - delay]


def test_a_step_that_is_queued_late_starts_late(tmp_path: Path) -> None:
    runner, clock = timed(tmp_path, "[mixed]\nseconds = 10")
    runner.execute(PROMPT)
    clock.now += 5
    assert runner.execute(step(1, (0, 1, 5))).waited_nanos == 0
    assert clock.now == 25


def test_a_generation_begins_when_the_device_has_done_the_work_before(tmp_path: Path) -> None:
    runner, clock = timed(tmp_path, "[mixed]\nseconds = 10")
    runner.begin(PROMPT)
    runner.device.queue(50)  # the device hangs for 50 seconds
    runner.execute(StepInput(2, 0, ints(), ints(), ints()))
    assert clock.now == 60


def test_only_the_drafts_that_the_worker_proposes_take_time(tmp_path: Path) -> None:
    """Three drafts are planned, but the worker proposes none, because no n-gram recurs."""
    text = "[mixed]\nseconds = 0\nseconds_per_token = 10"
    ngrams = '{"method": "ngram", "num_speculative_tokens": 3}'
    runner, clock = timed(tmp_path, text, speculative_config=ngrams)
    runner.execute(PROMPT)
    assert clock.now == 50
    drafts = {"num_draft_tokens": ints(3), "draft_token_ids": ints(-1, -1, -1)}
    runner.execute(step(1, (0, 4, 5), **drafts))
    assert clock.now == 60


def test_a_slow_device_takes_a_multiple_of_the_time(tmp_path: Path) -> None:
    runner, clock = timed(tmp_path, "[mixed]\nseconds = 10")
    runner.device.slowness = 3
    runner.execute(PROMPT)
    assert clock.now == 30


def test_a_worker_takes_the_time_of_its_profile(tmp_path: Path) -> None:
    worker = simulated(
        tmp_path,
        profile=save_profile(tmp_path, "kv_cache_memory_bytes = 1_000_000\n[mixed]\nseconds=0.05"),
        max_model_len=96,
    )
    began = time.perf_counter()
    worker.runner.execute(PROMPT)
    assert 0.05 <= time.perf_counter() - began < 0.5


def test_a_measured_profile_has_the_memory_of_the_cache(tmp_path: Path) -> None:
    text = "kv_cache_memory_bytes = 100_000\n[mixed]\nseconds = 0"
    save_configuration(tmp_path)
    worker = build(tmp_path, profile=save_profile(tmp_path, text), max_model_len=64)
    assert worker.description.bytes_per_block == 6144
    assert worker.description.num_blocks == 100_000 // 6144
    assert "of 0.1 MiB in the profile" in worker.description.kv_cache_sizing


HARDWARE = ComputedProfile(
    memory_bytes=10_000,
    bandwidth_bytes_per_second=200,
    operations_per_second=4000,
    bandwidth_efficiency=0.5,
    compute_efficiency=0.25,
    seconds_per_step=3,
)
SIZE = ModelSize(
    weight_bytes=900,
    read_bytes=800,
    products_per_token=500,
    attention_width=50,
    kv_bytes_per_token=20,
    hidden_size=2,
    intermediate_size=3,
    vocab_size=5,
    itemsize=2,
)


def test_a_computed_profile_follows_its_formula() -> None:
    """The device reads 100 bytes and executes 1000 operations in a second."""
    times = HARDWARE.step_times(SIZE)
    assert times.seconds(ints(1), ints(9)) == 3 + 8 + 1 + 10 * 0.2
    assert times.seconds(ints(2), ints(0)) == pytest.approx(3 + 8 + 2 + 3 * 0.2)
    limits = BatchLimits(4, 64, 10, 5, 4, 9)
    free = HARDWARE.free_memory(SIZE, limits, None)
    assert (free.of_bytes, free.utilization, free.used_bytes) == (10_000, 0.9, 900)
    assert free.activation_bytes == 10 * (6 * 2 + 4 * 3) * 2 + 4 * 4 * 4 * 5


def test_every_profile_is_read_and_says_how_it_was_made() -> None:
    names = profile_names()
    assert {"h100-80gb", "a100-80gb", "l4"} <= set(names)
    for name in names:
        assert isinstance(read_profile(name), MeasuredProfile | ComputedProfile)


def test_a_large_model_on_a_large_gpu(tmp_path: Path) -> None:
    """Llama 3 8B has 16 GB of weights, and 128 KiB of keys and values for each token. An H100 reads
    the weights, as each decode step does, in six milliseconds.
    """
    save_configuration(tmp_path)
    (tmp_path / "config.json").write_text(
        """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "eos_token_id": 128001}"""
    )
    worker = build(tmp_path, profile="h100-80gb", max_num_seqs=256)
    own = worker.description
    assert own.kernels == "simulated, profile h100-80gb"
    assert own.bytes_per_block == 16 * 128 * 1024
    assert 400_000 < own.num_blocks * 16 < 500_000
    times = timed_model(worker).times
    assert 0.0062 < times.seconds(ints(1), ints(0)) < 0.0072
    assert 0.2 < times.seconds(ints(8192), ints(0)) < 0.3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[mixed]", r"must have mixed.seconds or mixed.seconds_by_tokens"),
        (
            "[mixed]\nseconds_by_tokens = [[4, 1], [4, 2]]",
            "as pairs of a number of tokens and a time",
        ),
        ("[mixed]\nseconds_by_tokens = [[0, 1]]", "as pairs of a number of tokens and a time"),
        ("[mixed]\nseconds_by_tokens = [[4, -1]]", "as pairs of a number of tokens and a time"),
        ("[mixed]\nseconds_by_tokens = [4]", "mixed.seconds_by_tokens as pairs"),
        (
            "[mixed]\nseconds = 1\n[serving]\nseconds_by_requests = [[2, 1], [1, 1]]",
            "serving.seconds_by_requests as pairs of a number of requests",
        ),
        (
            "[mixed]\nsecond = 1",
            r"has the unknown key mixed.second; known are seconds, seconds_by_",
        ),
        ("[mixed]\nseconds = -1", r"must have mixed.seconds as a number of at least 0, not -1"),
        ("[mixed]\nseconds = 1", r"must have kv_cache_memory_bytes as a number"),
        ("kv_cache_memory_bytes = 1", r"must have the table \[mixed\]"),
        ("kv_cache_memory = 1\n[mixed]\nseconds = 1", r"has the unknown key 'kv_cache_memory'"),
        ("[hardware]\nmemory_bytes = 1", r"\[hardware\] missing 5 required"),
        ("mixed", r"Expected '='"),
        (
            "draft_acceptance_rate = 1.5\nkv_cache_memory_bytes = 1\n[mixed]\nseconds = 1",
            r"must have a draft_acceptance_rate of at most 1",
        ),
    ],
)
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    path = save_profile(tmp_path, text)
    with pytest.raises(SettingError, match=f"--profile {path}: .*{problem}"):
        read_profile(path)


def test_an_unknown_profile_names_those_that_there_are() -> None:
    with pytest.raises(SettingError, match=r"h1000 is neither a file nor one of 1\.1b-xeon"):
        read_profile("h1000")
    with pytest.raises(
        SettingError, match=("--device simulated needs --profile with a TOML file or one of")
    ):
        read_profile(None)


def test_settings_that_are_not_simulated_are_refused(tmp_path: Path) -> None:
    save_configuration(tmp_path)
    draft = f'{{"model": "{tmp_path}", "num_speculative_tokens": 2}}'
    undrafted = save_profile(tmp_path, "kv_cache_memory_bytes = 4_000_000\n[mixed]\nseconds = 0")
    with pytest.raises(SettingError, match=r"no table \[draft\] has the times of a draft model"):
        build(tmp_path, profile=undrafted, speculative_config=draft)
    profile = save_profile(tmp_path)
    wanted = WorkerSettings(model=tmp_path, device=DeviceSetting.CPU, profile=profile)
    with pytest.raises(SettingError, match="--profile needs --device simulated"):
        build_worker(wanted, "w", lambda: None)


def test_a_model_whose_cache_only_its_code_knows_is_refused(tmp_path: Path) -> None:
    save_configuration(tmp_path, "opt")
    with pytest.raises(UnsupportedModel, match="native decoder, which architecture OPTForCausalLM"):
        build(tmp_path)
