"""Streams of a gateway that are read concurrently, and the load of its replicas."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Thread

from services.cli.client import Client, ServerAway
from services.cli.deploy.ports import Answer
from services.cli.errors import CommandError

_STARTS = ("def parse(", "class Queue:", "import os\n", "# The tests of the scheduler.\n")
_BEGUN_EVENTS = 8
_RETRY_SECONDS = 0.5
"""The wait before a stream whose connection broke is sent again."""
_PROMPT_TOKENS = 64
"""An upper bound of the number of tokens in a prompt."""


@dataclass(eq=False)
class GatewayFleet:
    """A client's view of the gateways behind a URL. `api_key` may change."""

    url: str
    api_key: str | None = None
    num_streams: int = 1
    max_tokens: int = 1
    stream_seconds: float = 60.0

    def streams(self) -> "GatewayStreams":
        """New streams, with the same prompts each time. Raises CommandError."""
        with self.client() as client:
            (card, *_) = client.get("/v1/models")["data"]
        body = {
            "model": card["id"],
            "max_tokens": min(self.max_tokens, card["max_model_len"] - _PROMPT_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        prompts = [
            f"# {number}\n{_STARTS[number % len(_STARTS)]}" for number in range(self.num_streams)
        ]
        streams = [_Stream(self, {**body, "prompt": prompt}) for prompt in prompts]
        return GatewayStreams(streams, self.stream_seconds)

    def running(self) -> dict[str, int]:
        with self.client() as client:
            replicas = client.get("/status")["replicas"]
        return {
            replica["address"].rpartition(":")[0]: (replica["stats"] or {}).get("num_running", 0)
            for replica in replicas
            if replica["ready"]
        }

    def client(self) -> Client:
        return Client(self.url, self.api_key)


class GatewayStreams:
    """The `Streams` of a gateway, with one thread for each stream. Streams must begin, and end,
    within `seconds`.
    """

    def __init__(self, streams: Sequence["_Stream"], seconds: float) -> None:
        self._streams, self._seconds = streams, seconds

    def begin(self) -> None:
        deadline = time.monotonic() + self._seconds
        for stream in self._streams:
            stream.start()
        for stream in self._streams:
            stream.begun.wait(max(0.0, deadline - time.monotonic()))

    def answers(self) -> Sequence[Answer]:
        deadline = time.monotonic() + self._seconds
        error = f"the stream did not end within {self._seconds:.0f} s"
        late = Answer(frozenset(), 0, (), error, self._seconds)
        for stream in self._streams:
            stream.is_last.set()
        for stream in self._streams:
            stream.join(max(0.0, deadline - time.monotonic()))
        return [stream.answer or late for stream in self._streams]


class _Stream(Thread):
    """A thread that repeats a request and reads its stream. After `is_last` is set, the current
    repetition is the last. If the connection breaks, the request is sent again with the same
    idempotency key. `begun` is set after the first events, or when the first stream has ended.
    `answer` is None until the last stream has ended.
    """

    def __init__(self, fleet: GatewayFleet, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._fleet, self._body = fleet, body
        self._breaks: list[str] = []
        self._last_event = self._longest_gap = 0.0
        self.begun, self.is_last = Event(), Event()
        self.answer: Answer | None = None

    def run(self) -> None:
        texts, error = list[str](), ""
        try:
            with self._fleet.client() as client:
                while not (texts and self.is_last.is_set()):
                    texts.append(self._text(client))
                    self.begun.set()
        except CommandError as failure:
            error = failure.sentence
        finally:
            self.answer = Answer(
                frozenset(texts), len(texts), tuple(self._breaks), error, self._longest_gap
            )
            self.begun.set()

    def _text(self, client: Client) -> str:
        idempotency_key = uuid.uuid4().hex
        self._last_event = time.monotonic()
        while True:
            try:
                return self._read(client, {"Idempotency-Key": idempotency_key})
            except ServerAway as broken:
                self._breaks.append(broken.sentence)
                time.sleep(_RETRY_SECONDS)

    def _read(self, client: Client, headers: dict[str, str]) -> str:
        if self._fleet.api_key:
            headers["Authorization"] = f"Bearer {self._fleet.api_key}"
        parts: list[str] = []
        for event in client.stream("/v1/completions", self._body, headers):
            parts += [choice["text"] for choice in event["choices"]]
            now = time.monotonic()
            self._longest_gap = max(self._longest_gap, now - self._last_event)
            self._last_event = now
            if len(parts) >= _BEGUN_EVENTS:
                self.begun.set()
        return "".join(parts)
