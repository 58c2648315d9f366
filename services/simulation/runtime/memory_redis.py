"""A Redis server in memory, with the commands that the services use, over RESP2.

Keys expire by the clock of the server's process. The services' Lua scripts are replaced by Python
methods. XADD trims exactly, even with `MINID ~`.
"""

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from services.common.redis import fleet_registry

EntryId = tuple[int, int]
_FIRST, _LAST = (0, 0), (1 << 64, 0)


class CommandError(Exception):
    """An error that Redis sends as the reply to a command."""


@dataclass(slots=True)
class Stream:
    """A Redis stream: entries with increasing ids."""

    last_id: EntryId = _FIRST
    ids: list[EntryId] = field(default_factory=list)
    entries: list[list[bytes]] = field(default_factory=list)
    """Each entry is a list of its fields' names and values, alternating."""

    def add(self, entry_id: EntryId, fields: list[bytes]) -> None:
        if entry_id <= self.last_id:
            raise CommandError(
                "ERR The ID specified in XADD is equal or smaller than the target stream top item"
            )
        self.last_id = entry_id
        self.ids.append(entry_id)
        self.entries.append(fields)

    def trim(self, oldest: EntryId) -> None:
        count = bisect_left(self.ids, oldest)
        del self.ids[:count], self.entries[:count]

    def between(self, first: EntryId, last: EntryId) -> list[list[Any]]:
        begin, end = bisect_left(self.ids, first), bisect_right(self.ids, last)
        pairs = zip(self.ids[begin:end], self.entries[begin:end], strict=True)
        return [[b"%d-%d" % entry_id, fields] for entry_id, fields in pairs]


class MemoryRedis:
    """The keys and commands of a Redis server. `serve` serves one connection."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}
        self._ends: dict[bytes, int] = {}
        """Maps keys that expire to the time of their expiry, in milliseconds since 1970."""
        self._added: dict[asyncio.Future[None], None] = {}
        """Futures of waiting XREADs. They are set when an entry is added to a stream."""
        self._scripts: dict[str, Callable[..., Any]] = {
            fleet_registry._RENEW: self._renew_replica,
            fleet_registry._READ: self._read_replicas,
            "-- appends to a log as its owner": self._append_as_owner,
        }
        """Maps Lua scripts to methods. The script of an option, which this module must not import,
        is identified by its first line.
        """

    @property
    def lasting_keys(self) -> list[str]:
        """The names of the keys that never expire."""
        return [key for key in self.keys if key.encode() not in self._ends]

    @property
    def keys(self) -> list[str]:
        """The names of all keys that have not expired."""
        return [key.decode() for key in list(self._values) if self._get(key) is not None]

    def names_in(self, key: str) -> list[str]:
        """The names of a hash's fields."""
        return [name.decode() for name in self._get(key.encode()) or ()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Replies to commands until the client closes the connection."""
        try:
            while True:
                name, *arguments = await _read_command(reader)
                try:
                    answer = await self._execute(name.decode().lower(), arguments)
                except CommandError as error:
                    answer = error
                writer.write(_encoded(answer))
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def _execute(self, name: str, arguments: list[bytes]) -> Any:
        if name == "xread":
            return await self._xread(arguments)
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            raise CommandError(f"ERR unknown command '{name}'")
        return command(*arguments)

    # Commands on keys of any type.

    def _get(self, key: bytes) -> Any:
        if self._ends.get(key, math.inf) <= _now_millis():
            self._remove(key)
        return self._values.get(key)

    def _get_or_add(self, key: bytes, make: Callable[[], Any]) -> Any:
        if self._get(key) is None:
            self._values[key] = make()
        return self._values[key]

    def _remove(self, key: bytes) -> bool:
        self._ends.pop(key, None)
        return self._values.pop(key, None) is not None

    def _remove_if_empty(self, key: bytes) -> None:
        if not self._values[key]:
            self._remove(key)

    def _do_ping(self) -> Any:
        return "PONG"

    def _do_client(self, *_: bytes) -> Any:
        return "OK"

    def _do_info(self, *_: bytes) -> Any:
        return b"# Cluster\r\ncluster_enabled:0\r\n"

    def _do_get(self, key: bytes) -> Any:
        return self._get(key)

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        if b"NX" in options and self._get(key) is not None:
            return None
        self._remove(key)
        self._values[key] = value
        if b"PX" in options:
            self._do_pexpire(key, options[options.index(b"PX") + 1])
        return "OK"

    def _do_incr(self, key: bytes) -> Any:
        number = int(self._get(key) or 0) + 1
        self._values[key] = b"%d" % number
        return number

    def _do_del(self, *keys: bytes) -> Any:
        return sum(self._get(key) is not None and self._remove(key) for key in keys)

    def _do_exists(self, *keys: bytes) -> Any:
        return sum(self._get(key) is not None for key in keys)

    def _do_pexpire(self, key: bytes, millis: bytes) -> Any:
        if self._get(key) is None:
            return 0
        self._ends[key] = _now_millis() + int(millis)
        return 1

    # Commands on hashes and sorted sets.

    def _do_hset(self, key: bytes, *pairs: bytes) -> Any:
        found: dict[bytes, bytes] = self._get_or_add(key, dict)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def _do_hget(self, key: bytes, name: bytes) -> Any:
        return (self._get(key) or {}).get(name)

    def _do_hgetall(self, key: bytes) -> Any:
        return [part for pair in (self._get(key) or {}).items() for part in pair]

    def _do_hdel(self, key: bytes, *names: bytes) -> Any:
        found = self._get(key)
        if found is None:
            return 0
        count = sum(found.pop(name, None) is not None for name in names)
        self._remove_if_empty(key)
        return count

    _do_zrem = _do_hdel

    def _do_eval(self, script: bytes, _num_keys: bytes, *rest: bytes) -> Any:
        text = script.decode()
        run = self._scripts.get(text) or self._scripts.get(text.partition("\n")[0])
        if run is None:
            raise CommandError("ERR this script is not written in Python")
        return run(*rest)

    def _renew_replica(self, key: bytes, record: bytes, millis: bytes) -> Any:
        self._read_replicas(key)
        self._get_or_add(key, dict)[record] = _now_millis() + int(millis)
        self._do_pexpire(key, millis)

    def _read_replicas(self, key: bytes) -> Any:
        found, now = self._get(key) or {}, _now_millis()
        for record in [record for record, end in found.items() if end <= now]:
            del found[record]
        return sorted(found, key=lambda record: (found[record], record))

    def _append_as_owner(self, log: bytes, lease: bytes, *arguments: bytes) -> Any:
        entry_id, value, begins, retention_millis, lease_millis, gateway = arguments
        if begins == b"0" and self._get(log) is None:
            return b"lost"
        try:
            self._do_xadd(log, entry_id, b"b", value)
        except CommandError:
            if self._do_xrevrange(log, b"+", b"-")[0] != [entry_id, [b"b", value]]:
                return b"fenced"
        self._do_pexpire(log, retention_millis)
        if lease_millis == b"0":
            self._do_del(lease)
        else:
            self._do_set(lease, gateway, b"PX", lease_millis)
        return b"done"

    # Commands on streams.

    def _do_xadd(self, key: bytes, *arguments: bytes) -> Any:
        rest, oldest = list(arguments), _FIRST
        if rest[0] == b"NOMKSTREAM":
            del rest[0]
            if self._get(key) is None:
                return None
        if rest[0] == b"MINID":
            oldest = _entry_id(rest[2])
            del rest[:3]
        wanted, *fields = rest
        stream: Stream = self._get_or_add(key, Stream)
        entry_id = _entry_id(wanted) if wanted != b"*" else self._next_id(stream)
        stream.add(entry_id, fields)
        stream.trim(oldest)
        added, self._added = self._added, {}
        for future in added:
            if not future.done():
                future.set_result(None)
        return b"%d-%d" % entry_id

    def _next_id(self, stream: Stream) -> EntryId:
        millis, number = stream.last_id
        return max((_now_millis(), 0), (millis, number + 1))

    def _do_xrange(self, key: bytes, first: bytes, last: bytes) -> Any:
        stream = self._get(key)
        return [] if stream is None else stream.between(_bound(first), _bound(last))

    def _do_xrevrange(self, key: bytes, last: bytes, first: bytes, *options: bytes) -> Any:
        entries = self._do_xrange(key, first, last)[::-1]
        return entries[: int(options[1])] if options else entries

    async def _xread(self, arguments: list[bytes]) -> Any:
        """Waits until a stream has entries after an id, at most for BLOCK milliseconds."""
        options = dict(zip(arguments[::2], arguments[1::2], strict=False))
        *_, key, after = arguments
        millis, number = _entry_id(after)
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(int(options[b"BLOCK"]) / 1000):
                while not (found := self._do_xrange(key, b"%d-%d" % (millis, number + 1), b"+")):
                    added = loop.create_future()
                    self._added[added] = None
                    try:
                        await added
                    finally:
                        self._added.pop(added, None)
                return [[key, found[: int(options[b"COUNT"])]]]
        return None


def _now_millis() -> int:
    return time.time_ns() // 1_000_000


def _entry_id(text: bytes) -> EntryId:
    millis, _, number = text.partition(b"-")
    return int(millis), int(number or 0)


def _bound(text: bytes) -> EntryId:
    """Parses one bound of a range. A parenthesis excludes the bound itself."""
    if text in (b"-", b"+"):
        return _FIRST if text == b"-" else _LAST
    millis, number = _entry_id(text.lstrip(b"("))
    return millis, number + text.startswith(b"(")


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """Reads a command: an array of strings, or the words of a line. Raises EOFError at the end."""
    head = await reader.readuntil(b"\r\n")
    if not head.startswith(b"*"):
        return head.split() or [b""]
    words = []
    for _ in range(int(head[1:])):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


def _encoded(answer: Any) -> bytes:
    match answer:
        case None:
            return b"$-1\r\n"
        case CommandError():
            return b"-%s\r\n" % str(answer).encode()
        case str():
            return b"+%s\r\n" % answer.encode()
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(answer), answer)
        case int():
            return b":%d\r\n" % answer
        case Sequence():
            return b"*%d\r\n%s" % (len(answer), b"".join(map(_encoded, answer)))
    raise TypeError(f"no answer of Redis: {answer!r}")
