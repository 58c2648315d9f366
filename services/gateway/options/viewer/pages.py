"""Serves the page /ui and its files from memory. The files contain no data of requests. The page
fetches the data by other routes, with an API key if the server requires one.
"""

import enum
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.telemetry.time_parts import WAITS_FOR

UI = "/ui"
_FOLDER = Path(__file__).parent / "ui"
_PAGE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    # The page loads nothing from other sites, has no inline scripts, and is not shown in frames.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers request each file every time, and get status 304 while it is unchanged.
    "Cache-Control": "no-cache",
}


class UiRole(enum.Enum):
    """The kind of the page's user. Operators can pause, drain and reset replicas on the page, and
    clients can chat with the model.
    """

    CLIENT = "client"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class UiPages:
    """Serves the page and its files to GET and HEAD requests, and redirects / to the page. Forwards
    all other requests to `app`.
    """

    def __init__(self, app: ASGIApp, role: UiRole) -> None:
        self._app = app
        self._files = {
            _path_of(path): _read(path, role)
            for path in sorted(_FOLDER.iterdir())
            if path.suffix in _MEDIA_TYPES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif scope["path"] == "/":
            await RedirectResponse(UI.removeprefix("/"))(scope, receive, send)
        elif scope["path"] == f"{UI}/":
            # The page's relative links would be wrong under this path.
            await RedirectResponse(f"..{UI}", status_code=308)(scope, receive, send)
        elif (file := self._files.get(scope["path"])) is not None:
            await _response(file, Headers(scope=scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _path_of(path: Path) -> str:
    return UI if path.name == _PAGE else f"{UI}/{path.name}"


def _read(path: Path, role: UiRole) -> _File:
    content = path.read_bytes().replace(b"$ROLE", role.value.encode())
    content = content.replace(b"$WAITS_FOR", json.dumps(WAITS_FOR).encode())
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return _File(content, _MEDIA_TYPES[path.suffix], etag)


def _response(file: _File, headers: Headers) -> Response:
    known = {one.strip().removeprefix("W/") for one in headers.get("if-none-match", "").split(",")}
    given = {**_HEADERS, "ETag": file.etag}
    if file.etag in known:
        return Response(status_code=304, headers=given)
    return Response(file.content, headers=given, media_type=file.media_type)
