"""Compares simulations with real runs of the services, for a model on this machine.

    python -m benchmarks.accuracy [--model demo,135m] [--seconds 40] [--rounds 1]

1. Profile: `stepwell profile` measures steps of a worker with the same settings and fits a model of
   step times to them. The errors are of held-out steps, which are not used in the fit.
2. Real runs at 0.5, 1 and 2 times the capacity, and at 2 times the capacity with each further
   policy. Clients send conversations over HTTP. With several rounds the means of the rounds are
   compared; a round has one run of each kind. The spread is the difference between the largest and
   the smallest mean job time of the rounds, divided by their mean.
3. Serving costs, the time that the services add to each step: for each of these runs, they are
   fitted to all other runs, and to further runs with other conversations. Runs at other times are
   needed, because the speed of a shared machine changes.
4. Comparison: the simulations use the same conversations, the same scheduler settings and the
   fitted times.
5. Replay: `stepwell replay` repeats every plan of the real runs of part 2 from their step logs.

The capacity is the number of conversations a second that the simulation completes if all arrive at
the same time, without pauses.

With `--workload` other programs than chat are sent. Clients name programs, tools and last turns.
With `--simulated` the services run a simulated device with the profile. The profile's errors then
do not affect the comparison.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accuracy.conversations import Conversations, at_once, with_priorities
from benchmarks.accuracy.real import CLIENTS, RealRun, run_conversations
from benchmarks.accuracy.serving import Decoding, decodings, fit_serving, median_error, total_error
from benchmarks.common.arguments import DEMO, count, make_parser, positive
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.common.processes import environment
from benchmarks.common.runs import run_measurement
from benchmarks.common.tables import table_text
from services.cli.profile.command import cost_lines
from services.cli.replay.log_file import StepLogFile
from services.cli.replay.log_replay import LogReplay
from services.cli.settings import UpSettings
from services.scheduler.core.config import SchedulerConfig
from services.simulation.laboratory.accounts import percentile
from services.simulation.laboratory.programs import Program
from services.simulation.laboratory.run import RunResult, Setup, simulate
from services.simulation.laboratory.workloads import NAMES
from services.worker.core.step_times import NO_SERVING, ServingCosts, StepTimes
from services.worker.profiles.profile import MeasuredProfile, read_profile

FITTED_LOADS = 0.2, 0.5, 1.0
"""Loads, relative to the capacity, of the real runs that are only fitted: with few and with many
requests at once. This capacity is simulated without serving costs.
"""
SHORTEST = "benchmarks.accuracy.shortest_prompt:ShortestPromptFirst"
POLICIES = f"fcfs,priority,{SHORTEST}"
_SETTINGS = "max_num_seqs", "max_num_batched_tokens", "num_blocks"
_CAPACITY_PROGRAMS = 200


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures of a run, real or simulated. Times are in seconds."""

    mean_job: float
    p99_job: float
    mean_first_token: float
    hit_rate: float

    @classmethod
    def of_real(cls, run: RealRun) -> "Measures":
        jobs = run.job_seconds
        first = fmean(run.first_token_seconds)
        return cls(fmean(jobs), percentile(jobs, 0.99), first, run.hit_rate)

    @classmethod
    def of_simulated(cls, run: RunResult) -> "Measures":
        own = run.accounts
        first = fmean([*own.first_turn_seconds, *own.later_turn_seconds])
        hit_rate = own.num_cached_tokens / own.num_prompt_tokens
        return cls(fmean(own.job_seconds), percentile(own.job_seconds, 0.99), first, hit_rate)

    @classmethod
    def mean(cls, rounds: Sequence["Measures"]) -> "Measures":
        return cls(*(fmean(figures) for figures in zip(*map(astuple, rounds), strict=True)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of a load's real runs and of its simulation."""

    model: str
    policy: str
    load: float
    num_jobs: int
    rounds: list[Measures]
    """The figures of each real run."""
    simulated: Measures
    num_plans: int
    """Number of plans of the real runs. The replay produced equal plans."""
    decoding_error: float
    """The relative error of the summed times from first to last token, if they are computed from
    the steps of the real runs. It is the part of the error that the step times cause.
    """

    @property
    def real(self) -> Measures:
        return Measures.mean(self.rounds)

    @property
    def spread(self) -> float:
        """The relative difference between the largest and the smallest mean job time."""
        means = [measures.mean_job for measures in self.rounds]
        return (max(means) - min(means)) / fmean(means)

    def cells(self) -> list[str]:
        real, simulated = self.real, self.simulated
        pairs = [
            (getattr(real, name), getattr(simulated, name))
            for name in ("mean_job", "p99_job", "mean_first_token")
        ]
        times = [
            text
            for before, after in pairs
            for text in (f"{before:.3g}", f"{after:.3g}", f"{after / before - 1:+.1%}")
        ]
        points = f"{100 * (simulated.hit_rate - real.hit_rate):+.1f}"
        hits = [f"{real.hit_rate:.1%}", f"{simulated.hit_rate:.1%}", points]
        name = f"{self.model}, {self.policy.rpartition(':')[2]}, {self.load:g} times"
        ends = [f"{self.decoding_error:+.1%}", f"{self.spread:.1%}"]
        return [name, str(self.num_jobs), *times, *hits, *ends]


HEADER = (
    *("", "jobs", "mean job time, s", "simulated", ""),
    *("p99, s", "simulated", "", "first token, s", "simulated", ""),
    *("hit rate", "simulated", "points", "step times", "spread"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A real run."""

    measures: Measures
    config: SchedulerConfig
    decodings: list[Decoding]
    num_plans: int


class Benchmark:
    """Profiles, runs and simulates one model."""

    def __init__(self, model: Path, options: argparse.Namespace, directory: Path) -> None:
        self._model = model
        self._options = options
        self._directory = directory
        self._profile = (options.profiles or directory) / f"{model.name}.toml"
        self._conversations = Conversations(
            options.max_model_len,
            token_scale=options.token_scale,
            pause_scale=options.pause_scale,
            workload=options.workload,
        )
        self._times: StepTimes

    async def run(self) -> dict[str, Any]:
        """Runs all parts of the benchmark. Returns the figures."""
        errors = await self._read_profile()
        fitted = await self._decodings_of_fitted_loads()
        capacity = self._capacity(fit_serving(fitted))
        log(f"{self._model.name}: capacity {capacity:.3g} conversations a second")
        options, loads = self._options, self._options.loads
        names = [(options.policies[0], load) for load in loads]
        names += [(policy, loads[-1]) for policy in options.policies[1:]]
        sent = {(policy, load): self._programs(policy, load * capacity) for policy, load in names}
        runs: dict[tuple[str, float], list[Recorded]] = {name: [] for name in sent}
        for number in range(1, options.rounds + 1):
            for (policy, load), programs in sent.items():
                log(f"{self._model.name}: round {number}, {policy}, {load:g} times the capacity")
                runs[policy, load].append(await self._record(policy, programs))

        def others(name: tuple[str, float] | None) -> list[Decoding]:
            rounds = [rounds for other, rounds in runs.items() if other != name]
            return fitted + [one for run in chain(*rounds) for one in run.decodings]

        found = others(None)
        serving = fit_serving(found)
        return {
            "model": self._model.name,
            "held_out_steps": errors,
            "times": asdict(self._times),
            "serving": {
                "costs": asdict(serving),
                "num_answers": len(found),
                "median_error": median_error(found, serving),
                "median_error_without": median_error(found, NO_SERVING),
            },
            "capacity": capacity,
            "rows": [
                self._compare(*name, programs, runs[name], fit_serving(others(name)))
                for name, programs in sent.items()
            ],
        }

    async def _read_profile(self) -> list[str]:
        """Reads the profile, which is measured first if --profiles is not given. Returns the
        profile's lines about the errors of held-out steps.
        """
        path = self._profile
        if self._options.profiles is None:
            log(f"{self._model.name}: measuring steps")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.cli", "profile", "--model", str(self._model)),
                *("--output", str(path), "--steps", str(self._options.steps)),
                stdout=sys.stderr,
                env={**environment(), **self._worker_variables()},
            )
            if await process.wait():
                raise RuntimeError("stepwell profile failed")
        profile = read_profile(str(path))
        assert isinstance(profile, MeasuredProfile)
        self._times = profile.times
        lines = path.read_text().splitlines()
        return [line[2:] for line in lines if line.startswith(("# decode:", "# mixed:"))]

    async def _decodings_of_fitted_loads(self) -> list[Decoding]:
        capacity, found = self._capacity(NO_SERVING), []
        for load in FITTED_LOADS:
            log(f"{self._model.name}: fitting what the services add, {load:g} times the device's")
            run, step_log = await self._real("fcfs", self._arriving(load * capacity, seed=1))
            found += self._decodings(run, step_log)
        return found

    def _programs(self, policy: str, per_second: float) -> list[Program]:
        programs = self._arriving(per_second, seed=2)
        return with_priorities(programs) if policy == "priority" else programs

    async def _record(self, policy: str, programs: list[Program]) -> Recorded:
        """Does a real run, and replays its step log."""
        run, step_log = await self._real(policy, programs)
        return Recorded(
            Measures.of_real(run),
            StepLogFile(step_log).header.config,
            self._decodings(run, step_log),
            await num_equal_plans(step_log),
        )

    def _compare(
        self,
        policy: str,
        load: float,
        programs: list[Program],
        runs: list[Recorded],
        serving: ServingCosts,
    ) -> Comparison:
        setup = Setup(runs[0].config, self._times, serving)
        return Comparison(
            self._model.name,
            policy,
            load,
            len(programs),
            [run.measures for run in runs],
            Measures.of_simulated(simulate(setup, programs)),
            sum(run.num_plans for run in runs),
            total_error([one for run in runs for one in run.decodings], serving),
        )

    def _worker_variables(self) -> dict[str, str]:
        """Environment variables by which the profiled worker gets the services' settings."""
        settings = {name: getattr(self._options, name) for name in _SETTINGS}
        settings |= {"max_model_len": self._options.max_model_len}
        return {f"STEPWELL_WORKER_{name.upper()}": str(value) for name, value in settings.items()}

    def _arriving(self, per_second: float, seed: int) -> list[Program]:
        number = max(1, round(per_second * self._options.seconds))
        return self._conversations.arriving(number, per_second, seed)

    async def _real(self, policy: str, programs: list[Program]) -> tuple[RealRun, Path]:
        """Does a real run. Returns it and the path of its step log."""
        step_log = self._directory / "steps.jsonl"
        step_log.unlink(missing_ok=True)
        is_simulated = self._options.simulated
        settings = UpSettings(
            model=self._model,
            device="simulated" if is_simulated else None,
            profile=str(self._profile) if is_simulated else None,
            policy=policy,
            max_model_len=self._options.max_model_len,
            **{name: getattr(self._options, name) for name in _SETTINGS},
        )
        client = CLIENTS[self._options.client]
        return await run_conversations(settings, programs, step_log, client), step_log

    def _capacity(self, serving: ServingCosts) -> float:
        limits = {name: getattr(self._options, name) for name in _SETTINGS}
        config = SchedulerConfig(
            **limits,
            max_model_len=self._options.max_model_len,
            block_size=16,
            async_scheduling=True,
        )
        programs = at_once(self._conversations.arriving(_CAPACITY_PROGRAMS, 1.0, seed=3))
        run = simulate(Setup(config, self._times, serving), programs)
        return len(programs) / run.simulated_seconds

    def _decodings(self, run: RealRun, step_log: Path) -> list[Decoding]:
        with step_log.open() as lines:
            return decodings(lines, run.answered, self._times)


async def num_equal_plans(step_log: Path) -> int:
    """Replays a step log. Returns its number of plans. Raises RuntimeError if a plan differs."""
    file = StepLogFile(step_log)
    replay = LogReplay(file.header)
    for line in file:
        if differences := await replay.replay_entry(line.entry):
            raise RuntimeError(
                f"the replay differs from the step log in line {line.number}: {differences[0]}"
            )
    if not replay.is_complete:
        raise RuntimeError("the step log is incomplete: its last line is missing")
    return replay.history.num_plans


def ranking(rows: Sequence[Comparison], kind: str) -> list[str]:
    """The policies at the highest load, by ascending mean job time. `kind` is real or simulated."""
    ranked = sorted(
        (row for row in rows if row.load == max(row.load for row in rows)),
        key=lambda row: getattr(row, kind).mean_job,
    )
    return [row.policy.rpartition(":")[2] for row in ranked]


async def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures each model, and prints its report. Returns all figures."""
    found = machine()
    show(machine_text(found, command))
    results = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as directory:
        for model in options.model:
            result = await Benchmark(model, options, Path(directory)).run()
            report(result)
            results.append({**result, "rows": [asdict(row) for row in result["rows"]]})
    return {"command": command, "machine": found, "models": results}


def report(result: dict[str, Any]) -> None:
    rows, serving = result["rows"], result["serving"]
    show(f"{result['model']}: held-out steps: {'; '.join(result['held_out_steps'])}.")
    show("\n".join(["[serving]", *cost_lines(serving["costs"])]))
    show(
        "Fitted to {num_answers} answers. Median error of the times from first to last token: "
        "{median_error:.1%}, and {median_error_without:.1%} without these costs.".format(**serving)
    )
    show(table_text(HEADER, [row.cells() for row in rows]))
    num_plans = sum(row.num_plans for row in rows)
    show(f"Replay: all {num_plans:,} plans are equal.")
    for kind in ("real", "simulated"):
        show(f"Policies by mean job time, {kind}: {', '.join(ranking(rows, kind))}.")


def models(text: str) -> tuple[Path, ...]:
    """Parses a list of models that are separated by commas."""
    return tuple(find_model(str(DEMO) if name == DEMO.name else name) for name in text.split(","))


def loads(text: str) -> tuple[float, ...]:
    """Parses loads that are separated by commas. The result is in ascending order."""
    return tuple(sorted(map(positive, text.split(","))))


def main(argv: Sequence[str]) -> None:
    parser = make_parser("accuracy", __doc__)
    add = parser.add_argument
    add("--model", type=models, default="demo,135m", help="directories or sizes of random models")
    add(
        "--loads",
        type=loads,
        default="0.5,1,2",
        help="multiples of the capacity (default: 0.5,1,2)",
    )
    add("--policies", type=lambda text: text.split(","), default=POLICIES, help="three by default")
    add("--seconds", type=positive, default=40.0, help="conversations arrive for this time")
    add("--rounds", type=count, default=1, help="times that each compared run is made (default: 1)")
    add("--steps", type=count, default=600, help="steps to measure for a profile (default: 600)")
    add("--profiles", type=Path, help="directory with MODEL.toml (default: measure them)")
    add("--client", choices=CLIENTS, default="http", help="the package openai, or plain HTTP")
    add("--simulated", action="store_true", help="replace the model by a simulated device")
    add("--workload", choices=NAMES, default="chat", help="workload of stepwell simulate")
    add(
        "--token-scale", type=positive, default=0.25, help="multiplies token counts (default: 0.25)"
    )
    add("--pause-scale", type=positive, default=0.05, help="multiplies pauses (default: 0.05)")
    add("--max-model-len", type=count, default=1024)
    add("--max-num-seqs", type=count, default=16)
    add("--max-num-batched-tokens", type=count, default=512)
    add("--num-blocks", type=count, default=600)
    add("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    run_measurement("accuracy", argv, lambda command: measure(options, command), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
