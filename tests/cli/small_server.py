"""A small HTTP server with the parts of the OpenAI API that `stepwell`'s client commands use."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SmallServer(ThreadingHTTPServer):
    """Answers a completion with the words of the prompt, and a chat with the received messages, or
    each with `answer` if it is set.

    After the message "wait" the server sends half an answer, and sets `hung_up` once the client
    disconnects. The prompt "refuse" is refused, "break" breaks the connection, and "fail" sends an
    error in the stream. `model` is the model's name, `bodies` has all posted bodies, and `keys` the
    Authorization headers of all calls.
    """

    answer: str | None = None

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.model = "small"
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing about clients that disconnect or whose handshake fails."""


@contextmanager
def small_server(port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[SmallServer]:
    """A server that runs until the `with` block ends."""
    with SmallServer(port, tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: SmallServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        ...

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        if self.path == "/status":
            status = {"requests_in_flight": 0, "draining": False, "replicas": []}
            self._answer(200, {"model": self.server.model, **status})
        else:
            self._answer(200, {"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers["Authorization"])
        self.server.bodies.append(body)
        if body.get("prompt") == "refuse":
            self._answer(400, {"error": {"message": "top_k must be at least 0", "param": "top_k"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self._events(body):
            self.wfile.write(f"data: {event}\n\n".encode())

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        if self.server.answer is not None:
            answer = self.server.answer
            yield json.dumps({"choices": [{"text": answer, "delta": {"content": answer}}]})
        elif "messages" in body:
            said = " ".join(message["content"] for message in body["messages"])
            yield json.dumps({"choices": [{"delta": {"role": "assistant"}}]})
            yield json.dumps({"choices": [{"delta": {"content": f"[{said}"}}]})
            if body["messages"][-1]["content"] == "wait":
                self.rfile.read(1)
                self.server.hung_up.set()
            yield json.dumps({"choices": [{"delta": {"content": "]"}, "finish_reason": "stop"}]})
        else:
            for word in body["prompt"].split():
                yield json.dumps({"choices": [{"text": f"{word}."}]}, ensure_ascii=False)
        yield json.dumps({"choices": [], "usage": {}})
        if str(body.get("prompt")).startswith("fail"):
            detail = body["prompt"].removeprefix("fail")
            yield json.dumps({"error": {"message": f"the worker is away{detail}"}})
        if body.get("prompt") != "break":
            yield "[DONE]"

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
