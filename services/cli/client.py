"""A client of the HTTP API: requests, JSON responses and server-sent events."""

import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Self

import httpx

from services.cli.errors import CommandError
from services.cli.processes.tls_files import TlsFiles, why_no_tls

_UNIX = "unix:"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""As _CONTROLS, without tabs and line breaks."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ANY_HOST = "http://localhost"
"""The base URL for requests over a Unix socket, which has no host name."""

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_STREAM_TIMEOUT = httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS, read=None)
"""The time limits of a stream. Reads have no limit, because requests may be queued for long."""


class ServerAway(CommandError):
    """The server does not respond now, but may respond later."""


class Client:
    """A client of one server. Failures are CommandErrors. Closing a stream aborts its request."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        *,
        served_by: str = "stepwell up",
    ) -> None:
        """`served_by` is the command that starts the server. Error messages name it."""
        self._url = url.rstrip("/")
        self._served_by = served_by
        base_url, transport = self._url, None
        if url.startswith(_UNIX):
            base_url, transport = _ANY_HOST, httpx.HTTPTransport(uds=url.removeprefix(_UNIX))
        elif not self._url.startswith(("http://", "https://")):
            raise CommandError(f"--url {url} is not an http:// or https:// address")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=base_url,
                transport=transport,
                headers=headers,
                timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
                # A proxy in the environment cannot reach a server on this machine.
                trust_env=False,
                verify=(tls or TlsFiles()).context(),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise CommandError(f"--url {url} is not an address: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """Returns a JSON response to show to people. Clients and models choose some of its texts,
        so control characters, which could change the terminal, are replaced.
        """
        return _without_controls(self._answer("GET", path))

    def post(self, path: str, query: Mapping[str, Any]) -> Any:
        """Posts a call without a body. Returns the JSON response. The wait has no time limit."""
        return self._answer("POST", path, params=query, timeout=_STREAM_TIMEOUT)

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._answer("POST", path, json=body)

    def _answer(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        _refuse(response)
        return _parse(response.text)

    def default_model(self) -> str:
        return str(self._models()[0]["id"])

    def max_model_len(self, model: str) -> int | None:
        """The `max_model_len` of a model. None if the server does not report it."""
        lengths = {one["id"]: one.get("max_model_len") for one in self._models()}
        return lengths.get(model)

    def _models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self.get("/v1/models").get("data", [])
        if not models:
            raise CommandError(f"{self._url} serves no model")
        return models

    def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Generator[Any, None, None]:
        """Posts `body` and yields the JSON of each event until `[DONE]`."""
        try:
            with self._http.stream(
                "POST", path, json=body, headers=headers, timeout=_STREAM_TIMEOUT
            ) as response:
                if response.is_error:
                    response.read()
                    _refuse(response)
                yield from _until_done(events(response.iter_lines()))
        except httpx.HTTPError as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> CommandError:
        if "[SSL" in str(error):
            return CommandError(f"no TLS with {self._url}: {why_no_tls(str(error))}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerAway(
                f"no server answers at {self._url}; is `{self._served_by}` running there?"
            )
        if isinstance(error, httpx.TimeoutException):
            return ServerAway(f"{self._url} did not answer within {_ANSWER_SECONDS:.0f} s")
        return ServerAway(f"the connection to {self._url} broke: {error or type(error).__name__}")


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yields the joined `data` lines of each server-sent event (WHATWG HTML, 9.2)."""
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _until_done(datas: Iterable[str]) -> Iterator[Any]:
    for data in datas:
        if data == "[DONE]":
            return
        event = _parse(data)
        if isinstance(event, dict) and "error" in event:
            raise CommandError(_message_of(event) or json.dumps(event["error"]))
        yield event
    raise ServerAway("the connection ended before the answer was complete")


def _refuse(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = _message_of(response.json())
    except ValueError:
        message = None
    failure = ServerAway if response.is_server_error else CommandError
    raise failure(message or f"{response.url} answered {response.status_code}")


def _message_of(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return _CONTROLS_OF_TEXT.sub(_REPLACEMENT, message) if isinstance(message, str) else None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"the server's answer is not JSON: {text[:80]!r}") from error


def shown(text: str) -> str:
    """A piece of a model's answer as it is printed. A pipe gets it unchanged. For a terminal, which
    control characters could change, they are replaced, except tabs and line breaks. Carriage
    returns, which some models write before line breaks, are removed.
    """
    if not sys.stdout.isatty():
        return text
    return _CONTROLS_OF_TEXT.sub(_REPLACEMENT, text.replace("\r", ""))


def _without_controls(value: Any) -> Any:
    if isinstance(value, dict):
        return {_without_controls(name): _without_controls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_controls(each) for each in value]
    return _CONTROLS.sub(_REPLACEMENT, value) if isinstance(value, str) else value
