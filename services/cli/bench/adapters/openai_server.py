"""Sends requests to the measured server with OpenAI's API over HTTP/1.1."""

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.cli.bench.adapters.address import Address
from services.cli.bench.adapters.connection import Connections
from services.cli.bench.adapters.reply import AnswerReply, StreamReply, WholeReply
from services.cli.bench.core.record import Failure, RequestRecord
from services.cli.bench.core.session import Conversation, Message, Turn
from services.cli.bench.core.vocabulary import BY_USAGE, WORDS, Vocabulary
from services.cli.errors import CommandError

COMPLETIONS, CHAT = "completions", "chat"
APIS = (COMPLETIONS, CHAT)
_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The fields that all requests have in common. With vLLM's fields `ignore_eos` and `min_tokens`
    an output ends exactly at the requested length. Most servers accept these fields, but OpenAI's
    own server rejects them.
    """

    api: str
    model: str
    stream: bool
    ignore_eos: bool
    min_tokens: bool
    stream_usage: bool
    extra_body: Mapping[str, Any]

    def body(self, fields: Mapping[str, Any], output_len: int) -> dict[str, Any]:
        """The body of a request. Fields of `extra_body` override all other fields."""
        body: dict[str, Any] = {"model": self.model, **fields, "max_tokens": output_len}
        if self.stream:
            body["stream"] = True
        if self.stream and self.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = output_len
        return {**body, **self.extra_body}


class OpenAIServer:
    """Implements the core's `Server`."""

    def __init__(
        self,
        address: Address,
        form: RequestForm,
        headers: Mapping[str, str],
        clock: Callable[[], float],
        timeout_seconds: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.form = form
        self._address = address
        self._headers = headers
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._connections = Connections(address.host, address.port, clock, tls)
        self._head = self._make_head()

    def reform(self, **changes: Any) -> None:
        self.form = replace(self.form, **changes)

    def encode(self, fields: dict[str, Any], output_len: int) -> bytes:
        body = json.dumps(self.form.body(fields, output_len), separators=(",", ":")).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    async def send(self, request: bytes, record: RequestRecord, *, keep_answer: bool) -> str | None:
        reply: AnswerReply
        if self.form.stream:
            reply = StreamReply(record, keep_answer=keep_answer)
        else:
            reply = WholeReply(record)
        record.sent = self._clock()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                failure = await self._connections.exchange(request, reply)
        except TimeoutError:
            failure = Failure("timeout", f"no whole answer within {self._timeout_seconds:g} s")
        return reply.finish(failure)

    async def aclose(self) -> None:
        await self._connections.aclose()

    def _make_head(self) -> bytes:
        headers = {
            "Host": self._address.authority,
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if self.form.stream else "application/json",
            **self._headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        path = self._address.path + _PATHS[self.form.api]
        return f"POST {path} HTTP/1.1\r\n{lines}Content-Length: ".encode()


OPTIONAL_FIELDS = ("min_tokens", "ignore_eos", "stream_usage")
"""Optional fields of RequestForm, in the order in which they are dropped."""

_OUTPUT_LEN = 2
_REFUSED = ("http 400", "http 422")
_SHORT_WORDS, _LONG_WORDS = 32, 160


async def fit_form(server: OpenAIServer) -> list[str]:
    """Drops optional fields until the server accepts a request. Returns the dropped fields."""
    left = [name for name in OPTIONAL_FIELDS if getattr(server.form, name)]
    given_up: list[str] = []
    while True:
        failure = (await _ask(server, 1)).failure
        if failure is None:
            return given_up
        if failure.kind not in _REFUSED or not left:
            raise CommandError(
                f"the test request before the load failed: {failure.kind}: {failure.message}"
            )
        given_up.append(left.pop(0))
        server.reform(**{given_up[-1]: False})


async def vocabulary_by_usage(server: OpenAIServer) -> Vocabulary:
    """Estimates the tokens per word from the `usage` of two requests. Raises CommandError."""
    short = (await _ask(server, _SHORT_WORDS)).num_input_tokens
    long = (await _ask(server, _LONG_WORDS)).num_input_tokens
    if short is None or long is None or long <= short:
        raise CommandError(
            "the server has no /tokenize and reports no usage: give --tokenizer DIRECTORY"
        )
    return Vocabulary(WORDS, (long - short) / (_LONG_WORDS - _SHORT_WORDS), BY_USAGE)


async def _ask(server: OpenAIServer, num_words: int) -> RequestRecord:
    record = RequestRecord(0, 0, 0, is_warmup=True, intended=0.0, output_len=_OUTPUT_LEN)
    text = " ".join(WORDS[:num_words])
    conversation = Conversation(is_chat=server.form.api == CHAT)
    fields = conversation.ask(Turn((Message("user", text),), _OUTPUT_LEN))
    await server.send(server.encode(fields, _OUTPUT_LEN), record, keep_answer=False)
    return record
