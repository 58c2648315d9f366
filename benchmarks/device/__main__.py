"""Compares the times that clients of a simulated device measure with the device's profile.

    python -m benchmarks.device [--profile NAME] [--concurrency 1,32] [--clients PYTHON]

The model has the shape of Llama 3 8B. Each client sends bursts of requests. The scheduler logs its
steps, from which the expected times are computed with the profile's formula. The expected times
include the wait for the prompts of other requests, but not the work of gateway and scheduler, which
should overlap with the device's work. Two clients are measured: `stepwell bench` and, if
`--clients` names a Python interpreter that has it, the package openai.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.common.arguments import count, counts, make_parser, program
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.random_model import Shape, model_config, write_tokenizer
from benchmarks.common.runs import run_measurement
from benchmarks.common.stack import Stack
from benchmarks.common.tables import table_text
from benchmarks.device.expected import expected_times
from services.cli.settings import UpSettings
from services.worker.core.step_times import StepTimes
from services.worker.models.config import read_model_config
from services.worker.models.decoder import attention_layers
from services.worker.options.simulated.model_size import Sizes
from services.worker.profiles.profile import read_profile

LLAMA_8B = Shape(4096, 32, 32, 8, 14336, 128256, tied_embeddings=False)
MAX_MODEL_LEN = 8192
_LOG_SECONDS = 1.5
"""The wait, in seconds, until the scheduler has written its step log."""
_OPENAI = Path(__file__).with_name("openai_client.py")


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at the same time. Their prompts depend on `seed`."""

    url: str
    model: Path
    num_requests: int
    input_len: int
    output_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of a client's requests, in milliseconds."""

    ttft: list[float]
    itl: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of the times to the first token (TTFT) and the means of the times between tokens
    (ITL) of one client, in milliseconds.
    """

    client: str
    concurrency: int
    ttft_expected: float
    ttft_seen: float
    itl_expected: float
    itl_seen: float

    def cells(self) -> list[str]:
        pairs = (self.ttft_expected, self.ttft_seen), (self.itl_expected, self.itl_seen)
        figures = [
            text
            for expected, seen in pairs
            for text in (f"{expected:.2f}", f"{seen:.2f}", f"{seen / expected - 1:+.1%}")
        ]
        return [f"{self.client}, {self.concurrency} at once", *figures]


HEADER = ("", "TTFT by profile", "seen", "", "ITL by profile", "seen", "")


async def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures each client at each concurrency. Returns all figures."""
    found = machine()
    show(machine_text(found, command))
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as directory:
        model, steps = Path(directory) / "llama-8b", Path(directory) / "steps.jsonl"
        write_shape(model)
        times = step_times(model, options.profile)
        settings = UpSettings(
            model=model,
            device="simulated",
            profile=options.profile,
            max_num_seqs=max(options.concurrency),
            max_num_batched_tokens=MAX_MODEL_LEN,
        )
        async with Stack(settings, {"STEPWELL_SCHEDULER_STEP_LOG": str(steps)}) as stack:
            for concurrency in options.concurrency:
                for name, run in clients(options.clients).items():
                    log(f"{name}, {concurrency} at once")
                    shape = concurrency, options.input_len, options.output_len
                    bursts = [
                        Burst(f"http://{stack.http}", model, *shape, seed)
                        for seed in range(options.rounds + 1)
                    ]
                    await run(bursts[-1])  # a warm-up: the first requests of a client are slower
                    rows.append(await compare(name, run, bursts[:-1], steps, times))
    show(table_text(HEADER, [row.cells() for row in rows]))
    return {"command": command, "machine": found, "rows": [asdict(row) for row in rows]}


async def compare(
    name: str, run: Callable[[Burst], Any], bursts: Sequence[Burst], steps: Path, times: StepTimes
) -> Row:
    """Runs bursts one after another. Compares the times that the client measured with those
    expected from the logged steps.
    """
    await asyncio.sleep(_LOG_SECONDS)
    with closing(_end_of(steps)) as file:
        seen = [await run(burst) for burst in bursts]
        await asyncio.sleep(_LOG_SECONDS)
        logged = expected_times(file, times)
    # Leaves out the short requests by which a client first probes the server.
    expected = [each for each in logged if len(each.tokens) == bursts[0].output_len]
    if len(expected) != sum(burst.num_requests for burst in bursts):
        raise RuntimeError(f"{name} sent {len(expected)} requests")
    return Row(
        name,
        bursts[0].num_requests,
        1000 * statistics.median(request.ttft for request in expected),
        statistics.median(ttft for each in seen for ttft in each.ttft),
        1000 * statistics.mean(itl for request in expected for itl in request.itls),
        statistics.mean(itl for each in seen for itl in each.itl),
    )


def _end_of(path: Path) -> TextIO:
    """Opens a file at its end, so that only lines that are written later are read."""
    file = path.open()
    file.seek(0, SEEK_END)
    return file


def write_shape(directory: Path) -> None:
    """Writes the configuration and the tokenizer of the model, without weights."""
    directory.mkdir()
    config = model_config(LLAMA_8B) | {"max_position_embeddings": MAX_MODEL_LEN}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(LLAMA_8B.vocab_size, directory)


def step_times(model: Path, profile: str) -> StepTimes:
    """The profile's step times for the model, as the simulated worker computes them."""
    sizes = Sizes(read_model_config(model), torch.bfloat16)
    size = sizes.model_size(attention_layers(sizes.config), sizes.stage(0, 1), 1)
    return read_profile(profile).step_times(size)


def clients(python: str | None) -> dict[str, Callable[[Burst], Any]]:
    """Maps each client's name to a function that sends a burst."""

    async def bench(burst: Burst) -> Seen:
        return await _stepwell_bench(burst)

    async def openai(burst: Burst) -> Seen:
        assert python is not None
        found = json.loads(
            await _output(python, str(_OPENAI), burst.url, json.dumps(_figures(burst)))
        )
        return Seen(found["ttft"], found["itl"])

    found: dict[str, Callable[[Burst], Any]] = {"stepwell bench": bench}
    return found if python is None else found | {"openai": openai}


def _figures(burst: Burst) -> dict[str, int]:
    return {
        "num_requests": burst.num_requests,
        "input_len": burst.input_len,
        "output_len": burst.output_len,
        "seed": 1000 + burst.seed,
    }


async def _stepwell_bench(burst: Burst) -> Seen:
    number = str(burst.num_requests)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        await _output(
            *(sys.executable, "-m", "services.cli", "bench", "--url", f"{burst.url}/v1"),
            *("--max-concurrency", number, "--num-requests", number, "--seed", str(burst.seed)),
            *("--input-len", str(burst.input_len), "--output-len", str(burst.output_len)),
            *("--tokenizer", str(burst.model), "--json", file.name),
        )
        rows = json.load(file)["requests"]
    return Seen([row["ttft_ms"] for row in rows], [gap for row in rows for gap in row["itl_ms"]])


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {errors.decode()[-800:]}")
    return output.decode()


def main(argv: Sequence[str]) -> None:
    parser = make_parser("device", __doc__)
    parser.add_argument("--profile", default="h100-80gb", help="default: h100-80gb")
    parser.add_argument("--concurrency", type=counts, default=(1, 32), help="default: 1,32")
    parser.add_argument("--input-len", type=count, default=2000, help="tokens (default: 2000)")
    parser.add_argument("--output-len", type=count, default=100, help="tokens (default: 100)")
    parser.add_argument("--rounds", type=count, default=3, help="number of bursts (default: 3)")
    parser.add_argument(
        "--clients",
        type=program,
        help="Python interpreter with the package openai, which sends the requests",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    run_measurement("device", argv, lambda command: measure(options, command), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
