"""Sends requests of many kinds at once. Each answer must equal the request's answer alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from benchmarks.soak.checked_streams import make_request
from services.common.rpc.channel import open_channel

ANSWER_SECONDS = 30.0
_NUM_PROMPT_TOKENS, _NUM_TOKENS = 60, 24
_LOOKS = ("/metrics", "/activity", "/health")

Answer = list[bytes]
"""A complete answer as pieces that do not depend on how it was divided into messages."""


class Batch:
    """One request of each kind. All requests are sent through one gateway."""

    def __init__(self, http: str, address: str, vocab_size: int) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)
        self._http = httpx.AsyncClient(base_url=f"http://{http}", trust_env=False)
        plain = [
            make_request(number, vocab_size, _NUM_PROMPT_TOKENS, _NUM_TOKENS) for number in range(6)
        ]
        self._asked: dict[str, Callable[[], Awaitable[Answer]]] = {
            f"stream {number}": self._generation(request) for number, request in enumerate(plain)
        }
        self._asked["prompt log-probabilities"] = self._generation(
            _changed(plain[0], prompt_logprobs=2, logprobs=3)
        )
        self._asked["several answers"] = self._generation(_several(plain[1]))
        self._asked["constrained"] = self._generation(_constrained(plain[2]))
        self._asked["with a stop token"] = self._generation(
            _changed(plain[3], stop_token_ids=range(3, vocab_size, 9), min_tokens=4)
        )
        self._asked["session"] = lambda: self._session(plain[4], plain[5])
        self._expected: dict[str, Answer] = {}

    async def measure(self) -> None:
        """Sends each request alone, and stores its answer."""
        for name, ask in self._asked.items():
            self._expected[name] = await ask()

    async def run(self) -> list[str]:
        """Sends all requests concurrently. Returns descriptions of failed and changed answers."""
        found = await asyncio.gather(*map(self._difference, self._asked), self._look())
        return [difference for difference in found if difference]

    async def reset_prefix_caches(self, admin: str) -> None:
        """Empties all replicas' prefix caches. `admin` is host:port of the administration API.
        Raises TimeoutError if blocks stay in use.
        """
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                answer = await self._http.post(f"http://{admin}/reset_prefix_cache")
                if answer.is_success:
                    return
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._channel.close()
        await self._http.aclose()

    async def _difference(self, name: str) -> str:
        try:
            answer = await self._asked[name]()
        except grpc.aio.AioRpcError as error:
            return f"{name} failed: {error.code().name}: {error.details()}"
        return "" if answer == self._expected[name] else f"{name} has another answer"

    async def _look(self) -> str:
        """Makes the gateway query the states of its schedulers. Returns a description of a failed
        query, or an empty text. The states are not checked.
        """
        for path in _LOOKS:
            try:
                answer = await self._http.get(path, timeout=ANSWER_SECONDS)
            except httpx.HTTPError as error:
                return f"{path} is not answered: {type(error).__name__}"
            if answer.status_code >= 500 and path != "/health":
                return f"{path} answers {answer.status_code}"
        return ""

    def _generation(self, request: gateway_pb2.GenerateRequest) -> Callable[[], Awaitable[Answer]]:
        async def ask() -> Answer:
            call = self._stub.Generate(request, timeout=ANSWER_SECONDS, wait_for_ready=True)
            return _joined([piece async for piece in call])

        return ask

    async def _session(self, *turns: gateway_pb2.GenerateRequest) -> Answer:
        call: Any = self._stub.GenerateSession(timeout=ANSWER_SECONDS, wait_for_ready=True)
        pieces: list[gateway_pb2.GenerateResponse] = []
        for turn in turns:
            await call.write(gateway_pb2.GenerateSessionRequest(turn=turn))
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return _joined(pieces)
                pieces.append(message.piece)
                if message.piece.finish_reason:
                    break
        await call.done_writing()
        return _joined(pieces)


def _joined(pieces: list[gateway_pb2.GenerateResponse]) -> Answer:
    """Joins the messages of each sequence, without the fields that depend on the prefix cache."""
    sequences: dict[int, gateway_pb2.GenerateResponse] = {}
    for piece in pieces:
        whole = sequences.setdefault(piece.index, gateway_pb2.GenerateResponse(index=piece.index))
        text = whole.text + piece.text
        whole.MergeFrom(piece)
        whole.text = text
        whole.ClearField("request_id")
        whole.usage.ClearField("num_cached_tokens")
    return [sequences[index].SerializeToString(deterministic=True) for index in sorted(sequences)]


def _changed(
    request: gateway_pb2.GenerateRequest, **sampling: object
) -> gateway_pb2.GenerateRequest:
    copy = gateway_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.sampling.MergeFrom(common_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
    return copy


def _several(request: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateRequest:
    copy = _changed(request)
    copy.n = 3
    return copy


def _constrained(request: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateRequest:
    wanted = common_pb2.StructuredOutputs(
        kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text="[a-z]{4,12}"
    )
    copy = _changed(request, structured_outputs=wanted)
    copy.ignore_eos = False
    return copy
