"""Constrains answers to JSON schemas while services are killed. Complete answers must be valid.

    python -m benchmarks.soak schemas --schemas DIR [--count 400] [--kills 6] [--at-once 16]

The .json files in DIR and its subdirectories are schemas. The directory `data` of JSONSchemaBench
(https://github.com/guidance-ai/jsonschemabench) can be used. --count schemas are selected at
random, and each constrains one sampled answer. Unconstrained requests run at the same time. The KV
cache is too small for all requests, so that requests wait and are preempted. Worker, scheduler and
pool are killed in rotation, and the supervisor of `stepwell up` restarts them. Finished answers are
validated with jsonschema-rs, which does not use the code that constrains answers. Answers that
reached --max-tokens are incomplete and are not validated. Schemas that the gateway refuses are
counted, grouped by the reason.
"""

import asyncio
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.common.arguments import add_model, count, make_parser
from benchmarks.common.console import log
from benchmarks.common.runs import run_program
from benchmarks.common.tables import table_text
from benchmarks.soak.replicas import Replicas
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings

REQUEST_SECONDS = 180.0
NUM_NEIGHBORS = 4
NEIGHBOR_TOKENS = 100
PROMPT = "class Point:"
VICTIMS = ("worker", "scheduler", "kvpool")
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} ([\d.]+)", re.MULTILINE)
_NUMBER = re.compile(r"\d+")
_MAX_REASON = 60


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the run."""

    model: Path
    schemas: Sequence[tuple[str, str]]
    """Pairs of the file name and the text of a schema."""
    num_kills: int
    num_at_once: int
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Outcomes:
    """The outcomes of the schemas and of the unconstrained requests."""

    valid: int = 0
    incomplete: int = 0
    invalid: list[str] = field(default_factory=list)
    """File names of the schemas with invalid answers, each with the validation error."""
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    """Maps the reasons for which the validator rejects a schema to numbers of finished answers."""
    neighbors: int = 0
    num_preemptions: int = 0
    progressed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_done(self) -> int:
        counted = self.valid + self.incomplete + len(self.invalid) + len(self.failed)
        return counted + self.refused.total() + self.unjudged.total()

    @property
    def are_good(self) -> bool:
        return not self.invalid and not self.failed

    def text(self) -> str:
        """A table of the outcomes, the reasons of refusals, and the failures."""
        rows = [
            ("finished and valid", self.valid),
            ("finished and not valid", len(self.invalid)),
            ("finished, the validator does not take the schema", self.unjudged.total()),
            ("incomplete at the limit of tokens", self.incomplete),
            ("refused by name", self.refused.total()),
            ("failed", len(self.failed)),
            ("unconstrained requests beside them", self.neighbors),
            ("preemptions", self.num_preemptions),
        ]
        reasons = [("refused: " + reason, number) for reason, number in self.refused.most_common()]
        reasons += [("not judged: " + why, number) for why, number in self.unjudged.most_common()]
        table = table_text(
            ("answers to schemas", "number"),
            [(name, str(number)) for name, number in rows + reasons],
        )
        return "\n".join([table, *self.invalid, *self.failed])


class SchemaRequests:
    """Sends a request for each schema, and unconstrained requests at the same time."""

    def __init__(self, options: Options, http: httpx.AsyncClient) -> None:
        self._options, self._http = options, http
        self._left = list(enumerate(options.schemas))[::-1]
        self.outcomes = Outcomes()

    async def send_all(self) -> None:
        """Sends a request for each schema. Returns when all have been answered."""
        async with asyncio.TaskGroup() as tasks:
            neighbors = [tasks.create_task(self._neighbors(n)) for n in range(NUM_NEIGHBORS)]
            clients = [
                asyncio.create_task(self._client()) for _ in range(self._options.num_at_once)
            ]
            await asyncio.gather(*clients)
            for neighbor in neighbors:
                neighbor.cancel()

    async def until_done(self, number: int) -> None:
        while self.outcomes.num_done < number:
            self.outcomes.progressed.clear()
            await self.outcomes.progressed.wait()

    async def count_preemptions(self) -> None:
        """Adds the preemptions that the scheduler has counted since it was last started."""
        metrics = (await self._http.get("/metrics")).text
        self.outcomes.num_preemptions += int(sum(map(float, _PREEMPTIONS.findall(metrics))))

    async def _client(self) -> None:
        while self._left:
            number, (name, schema) = self._left.pop()
            await self._ask(number, name, schema)
            self.outcomes.progressed.set()

    async def _ask(self, number: int, name: str, schema: str) -> None:
        try:
            response = await self._http.post(
                "/v1/completions",
                json={
                    "prompt": PROMPT,
                    "max_tokens": self._options.max_tokens,
                    "seed": self._options.seed + number,
                    "structured_outputs": {"json": json.loads(schema)},
                },
            )
        except (httpx.HTTPError, ValueError) as error:
            self.outcomes.failed.append(f"{name}: {error!r}")
            return
        if response.status_code == httpx.codes.BAD_REQUEST:
            self.outcomes.refused[_kind(response.json()["error"]["message"])] += 1
        elif response.status_code != httpx.codes.OK:
            self.outcomes.failed.append(f"{name}: {response.status_code} {response.text}")
        else:
            (choice,) = response.json()["choices"]
            self._judge(name, schema, choice)

    def _judge(self, name: str, schema: str, choice: dict[str, Any]) -> None:
        if choice["finish_reason"] == "length":
            self.outcomes.incomplete += 1
            return
        if choice["finish_reason"] != "stop":
            self.outcomes.failed.append(f"{name}: ended by {choice['finish_reason']}")
            return
        try:
            validator = jsonschema_rs.validator_for(
                json.loads(schema), validate_formats=True, retriever=_retrieve
            )
        except (jsonschema_rs.ValidationError, ValueError) as error:
            self.outcomes.unjudged[_kind(str(error).partition("\n")[0])] += 1
            return
        try:
            errors = [error.message for error in validator.iter_errors(json.loads(choice["text"]))]
        except ValueError as error:
            errors = [str(error)]
        if errors:
            self.outcomes.invalid.append(f"{name}: {choice['text']!r} {errors[0]}")
        else:
            self.outcomes.valid += 1

    async def _neighbors(self, number: int) -> None:
        """Sends unconstrained requests, one after another."""
        while True:
            response = await self._http.post(
                "/v1/completions",
                json={
                    "prompt": PROMPT,
                    "max_tokens": NEIGHBOR_TOKENS,
                    "ignore_eos": True,
                    "seed": number,
                },
            )
            response.raise_for_status()
            self.outcomes.neighbors += 1


async def run(options: Options, directory: Path) -> Outcomes:
    """Runs the services and all requests. Raises RuntimeError if the services do not start."""
    settings = UpSettings(
        model=options.model, num_threads=1, num_blocks=96, max_num_seqs=32, max_model_len=1024
    )
    async with (
        Replicas(settings, directory, RestartPolicy(steady_seconds=1.0)) as replicas,
        httpx.AsyncClient(base_url=f"http://{replicas.http}", timeout=REQUEST_SECONDS) as http,
    ):
        requests = SchemaRequests(options, http)
        killing = asyncio.create_task(_kill_in_turn(options, replicas, requests))
        try:
            await requests.send_all()
        finally:
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
        await requests.count_preemptions()
        return requests.outcomes


async def _kill_in_turn(options: Options, replicas: Replicas, requests: SchemaRequests) -> None:
    """Kills services in rotation. The kills are spread evenly over the run."""
    each = len(options.schemas) / (options.num_kills + 1)
    for number in range(options.num_kills):
        await requests.until_done(int((number + 1) * each))
        name = VICTIMS[number % len(VICTIMS)]
        log(f"{requests.outcomes.num_done} schemas are done: {name} is killed")
        if name == "scheduler":  # the counts of a killed scheduler are lost
            await requests.count_preemptions()
        await replicas.kill(name)


def _retrieve(uri: str) -> Any:
    """Refuses to fetch a schema that another schema refers to, by raising ValueError."""
    raise ValueError(f"{uri} lies elsewhere")


def _kind(message: str) -> str:
    """The beginning of an error message without numbers, by which similar errors are grouped."""
    return _NUMBER.sub("…", message.partition("\n")[0])[:_MAX_REASON].strip()


def _draw(directory: Path, number: int, seed: int) -> list[tuple[str, str]]:
    """Names and texts of `number` random files."""
    paths = sorted(directory.rglob("*.json"))
    drawn = Random(seed).sample(paths, min(number, len(paths)))
    return [(path.name, path.read_text()) for path in drawn]


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    parser = make_parser("soak schemas", __doc__)
    add_model(parser)
    parser.add_argument("--schemas", type=Path, required=True, help="directory of .json files")
    parser.add_argument("--count", type=count, default=400, help="number of schemas (default: 400)")
    parser.add_argument(
        "--kills", type=int, default=6, help="number of times that a service is killed (default: 6)"
    )
    parser.add_argument(
        "--at-once", type=count, default=16, help="number of concurrent requests (default: 16)"
    )
    parser.add_argument("--max-tokens", type=count, default=500, help="(default: 500)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of schemas (default: 0)"
    )
    parsed = parser.parse_args(argv)
    schemas = _draw(parsed.schemas, parsed.count, parsed.seed)
    if not schemas:
        parser.error(f"--schemas: {parsed.schemas} has no .json files")
    options = Options(
        parsed.model, schemas, parsed.kills, parsed.at_once, parsed.max_tokens, parsed.seed
    )
    with tempfile.TemporaryDirectory(prefix="stepwell-schemas-") as directory:
        outcomes = run_program(run(options, Path(directory)))
    print(outcomes.text())
    return 0 if outcomes.are_good else 1
