"""The validated settings of `stepwell bench`, which the command's JSON output includes."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.bench.core.lengths import Range
from services.cli.bench.core.rate import RequestRate
from services.cli.errors import CommandError
from services.cli.processes.tls_files import TlsFiles

DEFAULT_REQUESTS = 100
DEFAULT_PROGRAMS = 40


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings of one run. Lengths are in tokens. None means that no flag set the value."""

    url: str
    model: str | None
    api: str
    stream: bool
    ignore_eos: bool
    headers: dict[str, str]
    extra_body: dict[str, Any]
    timeout_seconds: float
    request_rate: str | None
    burstiness: float
    max_concurrency: int | None
    num_requests: int | None
    duration_seconds: float | None
    num_warmups: int
    seed: int
    input_len: Range
    output_len: Range
    prefix_len: int
    num_prefixes: int
    turns: Range
    think_seconds: Range
    tokenizer: Path | None
    dataset: Path | None
    trace: Path | None
    programs: str | None
    num_programs: int
    anonymous: bool
    time_scale: float
    token_scale: float
    goodput: dict[str, float]
    tls: TlsFiles
    api_key: str | None = field(repr=False)

    @property
    def rate(self) -> RequestRate | None:
        """The arrival rate of an open loop. None for a closed loop or a trace."""
        return RequestRate.parse(self.request_rate) if self.request_rate else None

    @property
    def is_open(self) -> bool:
        """Whether arrival times are independent of the server's responses (an open loop)."""
        return self.request_rate is not None or self.trace is not None

    @property
    def num_expected(self) -> int | None:
        """The number of requests to send, warm-up included. None if the number is not limited."""
        return None if self.num_requests is None else self.num_warmups + self.num_requests

    @property
    def load_text(self) -> str:
        if not self.is_open:
            clients = self.max_concurrency or 1
            return f"closed loop, {clients} client{'s' * (clients > 1)}"
        at_most = f", at most {self.max_concurrency} at once" if self.max_concurrency else ""
        if self.trace is not None:
            return f"open loop, arrivals of {self.trace.name}{at_most}"
        return f"open loop, {self.request_rate} arrivals/s, burstiness {self.burstiness:g}{at_most}"

    def public(self) -> dict[str, Any]:
        """All settings as JSON values, without API key, certificates and the values of headers."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["api_key"], values["tls"]
        values["headers"] = sorted(self.headers)
        return {name: _plain(value) for name, value in values.items()}


def check(settings: BenchSettings, given: set[str]) -> None:
    """Raises CommandError if the flags in `given` contradict each other."""
    only_synthetic = {"input_len", "prefix_len", "num_prefixes"}
    for source, others in (
        ("trace", {"dataset", "request_rate", "burstiness", "turns", "think_time", "output_len"}),
        ("trace", only_synthetic),
        ("dataset", only_synthetic),
        ("programs", only_synthetic | {"dataset", "trace", "turns", "think_time", "output_len"}),
    ):
        if getattr(settings, source) is not None and (also := sorted(others & given)):
            raise CommandError(f"--{source} and {_flag(also[0])} contradict", exit_status=2)
    for name, needs in (
        ("time_scale", "trace"),
        ("burstiness", "request_rate"),
        ("num_prefixes", "prefix_len"),
        ("num_programs", "programs"),
        ("anonymous", "programs"),
    ):
        if name in given and needs not in given:
            raise CommandError(f"{_flag(name)} needs {_flag(needs)}", exit_status=2)
    if "token_scale" in given and not given & {"trace", "programs"}:
        raise CommandError("--token-scale needs --trace or --programs", exit_status=2)
    is_endless = settings.num_requests is None and settings.programs is None
    if settings.rate is not None and settings.rate.is_infinite and is_endless:
        raise CommandError(
            "--request-rate inf needs --num-requests: a duration has no last request", exit_status=2
        )
    for name in ("input_len", "output_len", "turns"):
        value: Range = getattr(settings, name)
        if not (value.is_whole and value.low >= 1):
            raise CommandError(f"{_flag(name)} must be at least 1, and whole", exit_status=2)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plain(value: Any) -> Any:
    if isinstance(value, Range | Path):
        return str(value)
    return value if value != float("inf") else "inf"
