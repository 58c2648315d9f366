"""The benchmark that compares simulations with real runs, with services on a simulated device."""

from pathlib import Path

import pytest

from benchmarks.accuracy.__main__ import Measures, num_equal_plans
from benchmarks.accuracy.conversations import Conversations
from benchmarks.accuracy.real import CLIENTS, HttpClient, run_conversations
from benchmarks.accuracy.serving import decodings, fit_serving
from services.cli.replay.log_file import StepLogFile
from services.cli.settings import UpSettings
from services.simulation.laboratory.programs import Turn
from services.simulation.laboratory.run import Setup, simulate
from services.worker.profiles.profile import MeasuredProfile, read_profile
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving
from tests.gateway.tiny_tokenizer import write_tokenizer

PROFILE = """
kv_cache_memory_bytes = 8_000_000
[mixed]
seconds = 0.01
"""


@pytest.mark.parametrize("client", CLIENTS)
async def test_each_client_reads_tokens_cached_tokens_and_times(
    client: str, tmp_path: Path
) -> None:
    fake = FakeScheduler(answer=[70, 71, 72, 73], num_cached_tokens=2)
    async with serving(write_tokenizer(tmp_path / "tiny"), fake) as served:
        sender = CLIENTS[client](served.base_url.removeprefix("http://"))
        answered = [
            await sender.send([5, 6, 7 + number], Turn(3, 4), {"job_id": "a job"})
            for number in range(2)
        ]
        await sender.close()
    for number, one in enumerate(answered):
        assert one.prompt == (5, 6, 7 + number)
        assert (one.token_ids, one.num_cached) == ([70, 71, 72, 73], 2)
        assert one.sent < one.first <= one.last
    assert answered[0].last <= answered[1].sent


@pytest.mark.slow
async def test_a_real_run_is_measured_replayed_and_simulated(
    random_model: Path, tmp_path: Path
) -> None:
    """The simulated device takes the profile's times. So the run and its simulation differ only by
    the time that the services add.
    """
    path, step_log = tmp_path / "steps.toml", tmp_path / "steps.jsonl"
    path.write_text(PROFILE)
    profile = read_profile(str(path))
    assert isinstance(profile, MeasuredProfile)
    settings = UpSettings(
        model=random_model,
        device="simulated",
        profile=str(path),
        max_model_len=512,
        max_num_seqs=4,
        num_blocks=200,
    )
    programs = Conversations(max_model_len=512, pause_scale=0.01).arriving(6, 10.0, seed=1)
    run = await run_conversations(settings, programs, step_log, HttpClient)
    turns = [turn for program in programs for turn in program.turns]
    assert len(run.job_seconds) == 6
    assert sorted(len(one.token_ids) for one in run.answered) == sorted(
        turn.num_output_tokens for turn in turns
    )
    assert await num_equal_plans(step_log) > 50
    config = StepLogFile(step_log).header.config
    real = Measures.of_real(run)
    simulated = Measures.of_simulated(simulate(Setup(config, profile.times), programs))
    assert 0 < simulated.mean_job < 1.1 * real.mean_job
    assert simulated.hit_rate == pytest.approx(real.hit_rate, abs=0.1)
    assert simulated.hit_rate > 0.1
    with step_log.open() as lines:
        found = decodings(lines, run.answered, profile.times)
    assert len(found) == sum(turn.num_output_tokens > 1 for turn in turns)
    curve = fit_serving(found).seconds_by_requests
    assert [size for size, _ in curve] == [1, 2, 4]
    assert min(seconds for _, seconds in curve) >= 0
