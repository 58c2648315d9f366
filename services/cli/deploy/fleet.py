"""Streams of a gateway that are read concurrently, and the load of its replicas."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Thread

from services.cli.client import Client
from services.cli.deploy.ports import Answer
from services.cli.errors import CommandError

_STARTS = ("def parse(", "class Queue:", "import os\n", "# The tests of the scheduler.\n")
_BEGUN_EVENTS = 8
_PROMPT_TOKENS = 64
"""An upper bound of the number of tokens in a prompt."""


@dataclass(eq=False)
class GatewayFleet:
    """A client's view of the gateway at a URL."""

    url: str
    api_key: str | None = None
    num_streams: int = 1
    max_tokens: int = 1
    stream_seconds: float = 60.0

    def streams(self) -> "GatewayStreams":
        """New streams, with the same prompts each time. Raises CommandError."""
        with self._client() as client:
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
        streams = [_Stream(self._client(), {**body, "prompt": prompt}) for prompt in prompts]
        return GatewayStreams(streams, self.stream_seconds)

    def running(self) -> dict[str, int]:
        with self._client() as client:
            replicas = client.get("/status")["replicas"]
        return {
            replica["address"].rpartition(":")[0]: (replica["stats"] or {}).get("num_running", 0)
            for replica in replicas
            if replica["ready"]
        }

    def _client(self) -> Client:
        return Client(self.url, self.api_key)


class GatewayStreams:
    """The `Streams` of a gateway, with one thread for each stream."""

    def __init__(self, streams: Sequence["_Stream"], seconds: float) -> None:
        self._streams, self._seconds = streams, seconds
        self._deadline = 0.0

    def begin(self) -> None:
        self._deadline = time.monotonic() + self._seconds
        for stream in self._streams:
            stream.start()
        for stream in self._streams:
            stream.begun.wait(max(0.0, self._deadline - time.monotonic()))

    def answers(self) -> Sequence[Answer]:
        late = Answer(
            frozenset(), f"the stream did not end within {self._seconds:.0f} s", self._seconds
        )
        for stream in self._streams:
            stream.is_last.set()
        for stream in self._streams:
            stream.join(max(0.0, self._deadline - time.monotonic()))
        return [stream.answer or late for stream in self._streams]


class _Stream(Thread):
    """A thread that repeats a request and reads its stream. After `is_last` is set, the current
    repetition is the last. `begun` is set after the first events, or when the first stream has
    ended. `answer` is None until the last stream has ended.
    """

    def __init__(self, client: Client, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._client, self._body = client, body
        self._longest_gap = 0.0
        self.begun, self.is_last = Event(), Event()
        self.answer: Answer | None = None

    def run(self) -> None:
        texts, error = set[str](), ""
        try:
            with self._client:
                while not (texts and self.is_last.is_set()):
                    texts.add(self._text())
                    self.begun.set()
        except CommandError as failure:
            error = failure.sentence
        finally:
            self.answer = Answer(frozenset(texts), error, self._longest_gap)
            self.begun.set()

    def _text(self) -> str:
        parts: list[str] = []
        before = time.monotonic()
        for event in self._client.stream("/v1/completions", self._body):
            parts += [choice["text"] for choice in event["choices"]]
            now = time.monotonic()
            self._longest_gap = max(self._longest_gap, now - before)
            before = now
            if len(parts) >= _BEGUN_EVENTS:
                self.begun.set()
        return "".join(parts)
