"""The streams of `stepwell deploy check` against a server whose connections break."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from services.cli.deploy.fleet import GatewayFleet

EVENT = json.dumps({"choices": [{"text": "word "}]})


class Server(ThreadingHTTPServer):
    """Breaks the first stream of each idempotency key after its first event."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str]] = []
        """Idempotency key and Authorization header of each stream."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m", "max_model_len": 99}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        is_first = key not in {before for before, _ in self.server.asked}
        self.server.asked.append((key, self.headers["Authorization"]))
        self.send_response(200)
        self.end_headers()
        events = [EVENT] if is_first else [EVENT, EVENT, "[DONE]"]
        self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())


@contextmanager
def running() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_stream_that_breaks_is_sent_again_with_its_key_and_counted() -> None:
    with running() as server:
        fleet = GatewayFleet(f"http://127.0.0.1:{server.server_address[1]}", "old")
        streams = fleet.streams()
        fleet.api_key = "new"
        streams.begin()
        (answer,) = streams.answers()
    assert answer.texts == {"word word "}
    assert answer.error == ""
    assert len(answer.breaks) == answer.num_runs
    assert answer.breaks[0] == "the connection ended before the answer was complete"
    keys = [key for key, _ in server.asked]
    assert keys[0::2] == keys[1::2]
    assert len(set(keys)) == answer.num_runs
    assert {authorization for _, authorization in server.asked} == {"Bearer new"}
