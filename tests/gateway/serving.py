"""A gateway in this process, on free ports, with fake schedulers."""

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from stepwell.gateway.v1 import gateway_pb2_grpc

from services.common.errors import StepwellError
from services.common.process.settings import SettingError
from services.common.rpc.channel import open_channel
from services.common.telemetry.tracing import Tracing, configure_tracing
from services.gateway.__main__ import Gateway
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.settings import GatewaySettings
from tests.gateway.fake_scheduler import FakeScheduler
from tests.waiting import until

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from services.common.tls.credentials import Tls

DEADLINE_SECONDS = 60.0


@dataclass
class Serving:
    gateway: Gateway
    schedulers: list[FakeScheduler]
    http: httpx.AsyncClient
    base_url: str
    grpc_address: str
    admin_address: str
    metrics_address: str
    channel: grpc.aio.Channel
    tokenizer: Any

    @property
    def scheduler(self) -> FakeScheduler:
        return self.schedulers[0]

    async def metrics(self) -> str:
        """The text of all metrics, including the series of each tenant."""
        return (await self.gateway.parts.fleet_metrics.collect(exemplars=False)).decode()

    @property
    def stub(self) -> Any:
        return gateway_pb2_grpc.InferenceStub(self.channel)

    # The packages of OpenAI and Anthropic are imported at first use, because that takes a second.

    def openai(self, **options: Any) -> "AsyncOpenAI":
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # noqa: PLC0415

        defaults = {
            "api_key": "none",
            "max_retries": 0,
            "http_client": DefaultAsyncHttpxClient(verify=False),
        }
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", **defaults | options)

    def anthropic(self, **options: Any) -> "AsyncAnthropic":
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient  # noqa: PLC0415

        defaults = {
            "api_key": "none",
            "max_retries": 0,
            "http_client": DefaultAsyncHttpxClient(verify=False),
        }
        return AsyncAnthropic(base_url=self.base_url, **defaults | options)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer._backend.encode(text, add_special_tokens=False).ids
        return ids


@cache
def tokenizer_of(model: Path) -> HfTokenizer:
    """The tokenizer of a model, cached because many tests serve the same model."""
    return load_tokenizer(model)


@asynccontextmanager
async def serving(
    model: Path,
    *schedulers: FakeScheduler,
    tracing: Tracing | None = None,
    num_ready: int | None = None,
    tls: "Tls | None" = None,
    internal_tls: "Tls | None" = None,
    http_verify: ssl.SSLContext | bool = False,
    further: Sequence[FakeScheduler] = (),
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Runs the fake schedulers, a gateway and its clients until the `with` block ends. The block
    begins when `num_ready` schedulers are ready, by default all. With `tls`, the HTTP client trusts
    the authorities of `http_verify`. The channel to the gateway's gRPC API uses no TLS. Each
    scheduler of `further` is the only replica of another model, which has the scheduler's
    `model_name`.
    """
    fakes = list(schedulers) or [FakeScheduler()]
    addresses = tuple([await fake.start() for fake in fakes])
    values = {
        "model": model,
        "schedulers": addresses,
        "http_address": "127.0.0.1:0",
        "address": "127.0.0.1:0",
        "drain_seconds": 1.0,
        "trace_slowest_per_minute": 0,
    } | settings
    num_wanted = len(fakes) if num_ready is None else num_ready
    tokenizer = tokenizer_of(model)
    try:
        known = GatewaySettings(**values)
        tracing = tracing or configure_tracing("gateway", "", known.trace_sample_ratio)
        others = [
            (
                replace(
                    known,
                    served_model_name=fake.model_name,
                    schedulers=(await fake.start(),),
                    lora_modules=(),
                ),
                tokenizer,
            )
            for fake in further
        ]
        gateway = Gateway(known, tokenizer, tracing, tls, internal_tls, further=others)
        bound = await gateway.start()
    except (StepwellError, SettingError):
        for fake in fakes:
            await fake.die()
        raise
    base_url = f"{'http' if tls is None else 'https'}://{bound.http}"
    channel = open_channel(bound.grpc)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=DEADLINE_SECONDS, verify=http_verify
    ) as http:
        serving = Serving(
            gateway,
            fakes,
            http,
            base_url,
            bound.grpc,
            bound.admin or "",
            bound.metrics or "",
            channel,
            tokenizer,
        )
        try:
            await until(lambda: gateway.membership.num_ready == num_wanted)
            await until(lambda: all(one.membership.num_ready == 1 for one in gateway.models[1:]))
            yield serving
        finally:
            await channel.close()
            await gateway.drain()
            for fake in (*fakes, *further):
                await fake.die()


def serving_with(model: Path, tools: str, reasoning: str) -> Any:
    return serving(
        model,
        FakeScheduler(max_model_len=4096, max_request_tokens=4000),
        tool_call_parser=tools,
        reasoning_parser=reasoning,
        enable_auto_tool_choice=True,
    )
