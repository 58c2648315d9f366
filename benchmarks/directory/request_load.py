"""Sends a light, steady load of short requests, and measures their times."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from stepwell.gateway.v1 import gateway_pb2_grpc

from benchmarks.common.clients import greedy_request
from benchmarks.common.gateways import GatewayProgram
from services.common.rpc.channel import open_channel

REQUESTS_PER_SECOND = 8.0
NUM_PROMPTS, SYSTEM_TOKENS, OWN_TOKENS = 24, 32, 16
NUM_TOKENS = 8
ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of a request.

    `seconds` is the time to its complete answer. `complaint` describes an error, and is empty if
    there was none.
    """

    number: int
    seconds: float
    complaint: str = ""


class RequestLoad:
    """Sends requests at fixed times, even if earlier requests have not ended (an open loop).

    Requests alternate between all gateways, and between gRPC and HTTP. Request number n is the same
    in every window, and its greedy answer must always be the same.
    """

    def __init__(
        self, gateways: Sequence[GatewayProgram], http: httpx.AsyncClient, vocab_size: int
    ) -> None:
        self._http = http
        self._http_addresses = [gateway.http for gateway in gateways]
        self._channels = [open_channel(gateway.grpc) for gateway in gateways]
        self._stubs = [gateway_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._prompts = _prompts(vocab_size)
        self._answers: dict[tuple[int, bool], object] = {}

    async def warm_up(self) -> None:
        """Fills caches by sending each request once. Raises RuntimeError if a request fails."""
        for number in range(2 * len(self._stubs) * NUM_PROMPTS):
            asked = await self._ask(number)
            if asked.complaint:
                raise RuntimeError(f"a request failed before any fault: {asked.complaint}")

    async def window(self, seconds: float) -> list[Asked]:
        """Sends requests for `seconds`. Returns their results when all have ended."""
        loop = asyncio.get_running_loop()
        began, tasks = loop.time(), []
        for number in range(round(seconds * REQUESTS_PER_SECOND)):
            await asyncio.sleep(max(0.0, began + number / REQUESTS_PER_SECOND - loop.time()))
            tasks.append(asyncio.create_task(self._ask(number)))
        return list(await asyncio.gather(*tasks))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _ask(self, number: int) -> Asked:
        """Sends request `number` to a gateway, in rotation. Every second request uses HTTP."""
        turn, gateway = divmod(number, len(self._stubs))
        prompt, over_http = (turn // 2) % NUM_PROMPTS, bool(turn % 2)
        ask = self._ask_http if over_http else self._ask_grpc
        began = time.perf_counter()
        try:
            answer: object = await ask(gateway, self._prompts[prompt])
            complaint = ""
        except (grpc.aio.AioRpcError, httpx.HTTPError) as error:
            answer, complaint = None, str(error) or repr(error)
        seconds = time.perf_counter() - began
        if not complaint and self._answers.setdefault((prompt, over_http), answer) != answer:
            complaint = "another answer than before"
        return Asked(number, seconds, complaint)

    async def _ask_grpc(self, gateway: int, prompt: list[int]) -> object:
        request = greedy_request(prompt, NUM_TOKENS)
        call = self._stubs[gateway].Generate(request, timeout=ANSWER_SECONDS)
        return [token async for piece in call for token in piece.token_ids]

    async def _ask_http(self, gateway: int, prompt: list[int]) -> object:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"http://{self._http_addresses[gateway]}/v1/completions"
        answer = await self._http.post(url, json=body, timeout=ANSWER_SECONDS)
        return answer.raise_for_status().json()["choices"]


def complaints(asked: Iterable[Asked]) -> list[str]:
    return [one.complaint for one in asked if one.complaint]


def _prompts(vocab_size: int) -> list[list[int]]:
    """Random prompts. Each group of four prompts has a common prefix."""
    prompts = []
    for number in range(NUM_PROMPTS):
        system, own = random.Random(f"system/{number // 4}"), random.Random(f"prompt/{number}")
        prompts.append(
            [system.randrange(3, vocab_size) for _ in range(SYSTEM_TOKENS)]
            + [own.randrange(3, vocab_size) for _ in range(OWN_TOKENS)]
        )
    return prompts
