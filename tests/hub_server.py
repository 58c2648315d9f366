"""An HTTP server with the part of the Hugging Face hub's API that downloads of models use."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The models that the server has, its faults, and the requests that it has received."""

    models: dict[str, Mapping[str, bytes]]
    """The files of each model. They are the contents of the branch main and of COMMIT."""
    token: str | None = None
    """The token that requests must have."""
    refusal: tuple[int, str] | None = None
    """A status and an X-Error-Code, with which all requests are answered."""
    cut: dict[str, int] = field(default_factory=dict)
    """File names, and the number of bytes after which the next download of the file breaks."""
    stuck: set[str] = field(default_factory=set)
    """Files whose downloads stop after half of the bytes, until `released` is set."""
    damaged: set[str] = field(default_factory=set)
    """Files whose last byte is wrong."""
    released: threading.Event = field(default_factory=threading.Event)
    half_sent: threading.Event = field(default_factory=threading.Event)
    """Set when a stuck file has been sent by half."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and header Range of each request."""
    url: str = ""

    def downloads(self, name: str) -> list[str | None]:
        """The header Range of each download of a file."""
        return [
            of_range
            for method, path, of_range in self.requests
            if method == "GET" and path.endswith(f"/{COMMIT}/{name}")
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        given = self.headers.get("Authorization")
        if self.hub.token is not None and given not in (None, f"Bearer {self.hub.token}"):
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif self.hub.token is not None and given is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.hub.refusal is not None:
            self._send(self.hub.refusal[0], b"", {"X-Error-Code": self.hub.refusal[1]})
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            repo, _, rest = path.strip("/").partition("/resolve/")
            self._send_file(rest.partition("/")[2], self.hub.models[repo])
        else:
            self._send(404, b"", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _describe(self, path: str) -> None:
        repo = "/".join(path.split("/")[:2])
        rest = path.removeprefix(repo)
        files = self.hub.models.get(repo)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest not in ("", "/revision/main", f"/revision/{COMMIT}", f"/tree/{COMMIT}"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest.startswith("/tree/"):
            tree = [{"type": "file", "path": name} | _entry(name, files[name]) for name in files]
            self._send_json([{**one, "oid": one["blobId"]} for one in tree])
        else:
            siblings = [{"rfilename": name} | _entry(name, files[name]) for name in files]
            self._send_json({"id": repo, "sha": COMMIT, "siblings": siblings, "private": False})

    def _send_file(self, name: str, files: Mapping[str, bytes]) -> None:
        content = files[name]
        if name in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {
            "ETag": f'"{_entry(name, files[name])["blobId"]}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        first = 0
        if "Range" in self.headers:
            first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(206 if first else 200, content[first:], headers, name)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.cut:
            self.wfile.write(body[: self.hub.cut.pop(name)])
            self.close_connection = True
        elif name in self.hub.stuck:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.half_sent.set()
            self.hub.released.wait(60)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _entry(name: str, content: bytes) -> dict[str, object]:
    """The size and the checksums of a file. Weights are in Git LFS."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, object] = {"size": len(content), "blobId": git}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        size = len(content)
        entry["lfs"] = {"size": size, "sha256": sha256, "oid": sha256, "pointerSize": 134}
    return entry


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Runs the hub at a free port of this machine."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        hub.released.set()
        server.shutdown()
        thread.join()
