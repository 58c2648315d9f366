"""Each benchmark program refuses a contradictory command line with one sentence."""

import sys
from collections.abc import Callable, Sequence

import pytest

from benchmarks.scheduler.__main__ import parse_options as scheduler
from benchmarks.serving.__main__ import parse_options as serving
from benchmarks.soak.endurance import parse_options as endurance
from benchmarks.soak.faults import parse_options as faults
from benchmarks.soak.hostility import parse_options as hostility
from benchmarks.soak.idle import parse_options as idle
from benchmarks.soak.overload import parse_options as overload
from benchmarks.step.__main__ import parse_options as step
from benchmarks.worker.__main__ import parse_options as worker

NO_MODEL = "no/such is neither a model directory nor one of"
NO_DIRECTORY = "argument --model: no/such is not a model directory"
NO_CHECKOUT = "argument --baseline: no/such is not a checkout of Stepwell"


@pytest.mark.parametrize(
    ("parse", "argv", "message"),
    [
        (serving, ["--model", "no/such"], NO_MODEL),
        (serving, ["--concurrency", "0"], "argument --concurrency: must be at least 1"),
        (serving, ["--concurrency", "many"], "argument --concurrency"),
        (serving, ["--baseline", "no/such"], NO_CHECKOUT),
        (step, ["--running", "0"], "argument --running: must be at least 1"),
        (step, ["--rounds", "none"], "argument --rounds"),
        (worker, ["--model", "no/such"], NO_MODEL),
        (worker, ["--baseline", "no/such"], NO_CHECKOUT),
        (
            worker,
            ["--baseline", ".", "--vllm-python", sys.executable],
            "not allowed with --vllm-python or --llamacpp-python",
        ),
        (scheduler, ["--rounds", "0"], "argument --rounds: must be at least 1"),
        (
            scheduler,
            ["--baseline", ".", "--vllm-python", "python"],
            "not allowed with --vllm-python",
        ),
        (idle, ["--minutes", "0"], "argument --minutes: must be above 0"),
        (overload, ["--factor", "0"], "argument --factor: must be above 0"),
        (overload, ["--model", "no/such"], NO_DIRECTORY),
        (overload, ["--", "--num-threads", "0"], "--num-threads must be at least 1"),
        (overload, ["--", "--factor", "2"], "--factor"),
        (endurance, ["--minutes", "0"], "argument --minutes: must be above 0"),
        (endurance, ["--model", "no/such"], NO_DIRECTORY),
        (hostility, ["--attackers", "0"], "argument --attackers: must be at least 1"),
        (faults, ["--streams", "0"], "argument --streams: must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    parse: Callable[[Sequence[str]], object],
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(argv)
    assert message in capsys.readouterr().err


def test_what_follows_two_dashes_are_settings_of_the_services() -> None:
    services = overload(["--concurrency", "8", "--", "--num-threads", "1"]).services
    assert (services.num_threads, services.max_num_seqs) == (1, 8)
