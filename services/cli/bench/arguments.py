"""The flags of `stepwell bench`, named as in other load generators for LLM servers."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.arguments import ClientParser
from services.cli.bench.adapters.openai_server import APIS, COMPLETIONS
from services.cli.bench.argument_types import (
    above_zero,
    above_zero_or_inf,
    count,
    count_or_zero,
    header,
    json_object,
    number_range,
    objective,
    request_rate,
)
from services.cli.bench.core.lengths import Range
from services.cli.bench.settings import DEFAULT_PROGRAMS, DEFAULT_REQUESTS, BenchSettings, check
from services.cli.processes.tls_files import TlsFiles
from services.simulation.laboratory.agents import LOADS

DESCRIPTION = """\
Sends a load to any server with OpenAI's API (Stepwell, vLLM, SGLang, llama.cpp) and measures time
to first token, time per output token, inter-token and end-to-end latency, throughput and goodput.
Without --request-rate the load is a closed loop of --max-concurrency clients; with it, or with a
trace, an open loop whose latencies count from the intended time of each request. docs/benchmarks.md
defines each figure.
"""


def parse(argv: Sequence[str]) -> tuple[BenchSettings, argparse.Namespace]:
    """Returns the settings, and the namespace that has the output flags. Raises CommandError."""
    flags = _parser().parse_args(argv)
    given = {name for name, value in vars(flags).items() if value is not None}
    num_requests = flags.num_requests
    is_bounded = flags.duration is not None or flags.trace is not None or flags.programs is not None
    if num_requests is None and not is_bounded:
        num_requests = DEFAULT_REQUESTS
    settings = BenchSettings(
        url=flags.url,
        model=flags.model,
        api=flags.api,
        stream=flags.stream,
        ignore_eos=flags.ignore_eos,
        headers=dict(flags.header),
        extra_body=flags.extra_body,
        timeout_seconds=flags.timeout,
        request_rate=flags.request_rate,
        burstiness=1.0 if flags.burstiness is None else flags.burstiness,
        max_concurrency=flags.max_concurrency,
        num_requests=num_requests,
        duration_seconds=flags.duration,
        num_warmups=flags.num_warmups,
        seed=flags.seed,
        input_len=flags.input_len or Range(256, 256),
        output_len=flags.output_len or Range(128, 128),
        prefix_len=flags.prefix_len or 0,
        num_prefixes=flags.num_prefixes or 1,
        turns=flags.turns or Range(1, 1),
        think_seconds=flags.think_time or Range(0, 0),
        tokenizer=flags.tokenizer,
        dataset=flags.dataset,
        trace=flags.trace,
        programs=flags.programs,
        num_programs=flags.num_programs or DEFAULT_PROGRAMS,
        anonymous=flags.anonymous is not None,
        time_scale=1.0 if flags.time_scale is None else flags.time_scale,
        token_scale=1.0 if flags.token_scale is None else flags.token_scale,
        goodput=dict(flags.goodput),
        tls=TlsFiles.taken_from(vars(flags)),
        api_key=flags.api_key,
    )
    check(settings, given)
    return settings, flags


def _parser() -> ClientParser:
    parser = ClientParser("bench", DESCRIPTION)
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_server(group: Any) -> None:
    group.add_argument("--model", help="name of the model (default: the first model of the server)")
    group.add_argument(
        "--api", choices=APIS, default=COMPLETIONS, help=f"which API (default: {COMPLETIONS})"
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stream the answers; without it only end-to-end latency is measured",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request answers of exactly --output-len tokens (with ignore_eos and min_tokens, if "
        "the server accepts them)",
    )
    group.add_argument(
        "--header",
        type=header,
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a header of each request; may be given several times",
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="more fields of each request, such as '{\"temperature\": 0}'",
    )
    group.add_argument(
        "--timeout",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="seconds after which a request without a complete answer counts as failed (default: "
        "600)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=request_rate,
        metavar="R",
        help="arrivals per second of requests, or of conversations if --turns is set; steps such "
        "as 2:30,8:30 (rate:seconds), a ramp such as 2-8:60, or inf for all at once",
    )
    group.add_argument(
        "--burstiness",
        type=above_zero_or_inf,
        metavar="X",
        help="shape of the gamma distribution of the gaps between arrivals: 1 is Poisson, less is "
        "more bursty, inf is constant (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=count,
        metavar="N",
        help="number of clients of a closed loop (default: 1), or limit on the concurrent requests "
        "of an open loop",
    )
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help=f"number of measured requests (default: {DEFAULT_REQUESTS} without --duration; all "
        "requests of a trace)",
    )
    group.add_argument(
        "--duration", type=above_zero, metavar="S", help="send requests for S seconds"
    )
    group.add_argument(
        "--num-warmups",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="the first N requests of the load are not measured (default: 0)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed sends the same load (default: 0)"
    )


def _add_prompts(group: Any) -> None:
    group.add_argument(
        "--input-len",
        type=number_range,
        metavar="N|A-B",
        help="tokens of each turn's text, fixed or drawn from a range (default: 256)",
    )
    group.add_argument(
        "--output-len", type=number_range, metavar="N|A-B", help="tokens to generate (default: 128)"
    )
    group.add_argument(
        "--prefix-len", type=count, metavar="N", help="tokens of a prefix that sessions share"
    )
    group.add_argument(
        "--num-prefixes", type=count, metavar="N", help="different prefixes (default: 1)"
    )
    group.add_argument(
        "--turns",
        type=number_range,
        metavar="N|A-B",
        help="number of requests of a conversation; each repeats the conversation so far (default: "
        "1)",
    )
    group.add_argument(
        "--think-time",
        type=number_range,
        metavar="S|A-B",
        help="seconds between an answer and the next turn (default: 0)",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="directory with a tokenizer.json that gives prompts their lengths (default: the "
        "server's /tokenize, or its usage)",
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="prompts instead of generated ones: JSON lines with prompt or messages, or JSON in "
        "ShareGPT's format",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals, lengths and shared blocks of a trace in Mooncake's format",
    )
    group.add_argument(
        "--time-scale", type=above_zero, metavar="X", help="multiplies a trace's times"
    )
    group.add_argument(
        "--token-scale",
        type=above_zero,
        metavar="X",
        help="multiplies lengths of a trace or of programs",
    )
    group.add_argument(
        "--programs",
        choices=LOADS,
        help="agents' programs, whose turns follow each other after the pauses of tools; arrivals "
        "are programs",
    )
    group.add_argument(
        "--num-programs",
        type=count,
        metavar="N",
        help=f"number of programs (default: {DEFAULT_PROGRAMS})",
    )
    group.add_argument(
        "--anonymous",
        action="store_const",
        const=True,
        help="omit the fields that name a request's program and tool and mark its last request",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        type=objective,
        default=[],
        metavar="FIGURE:MS",
        help="service level objectives of goodput in milliseconds: ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="write settings, figures and every request"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the run, as .png or .svg")
