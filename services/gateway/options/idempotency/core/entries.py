"""The entries of an answer's log, from which other gateways read the answer, and their encoding.

An entry starts with a CRC-32 of the following bytes. A version and a kind follow. Numbers are
little-endian. Each token id and each log-probability has 4 bytes. An entry contains the position of
each part of the output in its sequence, so that a reader can skip output that it already has.
"""

import json
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.common import errors
from services.common.request.byte_order import little_endian
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.options.idempotency.core.recording import Seen

_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<BB")  # version, kind
_BEGIN = struct.Struct("<32sHQQ")  # fingerprint, number of sequences, seed, arrival
_PART = struct.Struct("<HBIIII")  # index, flags, tokens before, tokens, prompt rows before, cached
_ROWS = struct.Struct("<HI")  # width, rows
_FINISH = struct.Struct("<Bi")  # length of the reason, stop token
_VERSION = 1
_BEGINS, _TAKES, _BRINGS, _FAILS = range(4)
_HAS_CACHED, _HAS_LOGPROBS, _HAS_PROMPT_LOGPROBS, _HAS_FINISH, _HAS_STOP_TOKEN = 1, 2, 4, 8, 16
_ERROR_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.StepwellError)
}

Part = tuple[int, Seen, Delta]


class DamagedEntry(ValueError):
    """Bytes that are not a valid entry."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of an answer. Readers ignore the entries before the last Begin."""

    fingerprint: bytes
    num_sequences: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class Take:
    """The gateway that writes this entry continues to generate another gateway's answer."""

    gateway: str


@dataclass(frozen=True, slots=True)
class Bring:
    """New output of the answer's sequences (one for each choice)."""

    parts: Sequence[Part]
    """For each sequence with new output: the sequence's index, the numbers of tokens and of rows of
    prompt log-probabilities before the new output, and the new output.
    """


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer ended with an error."""

    error: errors.StepwellError


Entry = Begin | Take | Bring | Fail


def entry_to_bytes(entry: Entry) -> bytes:
    match entry:
        case Begin(fingerprint, num_sequences, identity):
            numbers = (num_sequences, identity.seed, identity.arrival_unix_nanos)
            kind, body = _BEGINS, _BEGIN.pack(fingerprint, *numbers) + identity.request_id.encode()
        case Take(gateway):
            kind, body = _TAKES, gateway.encode()
        case Bring(parts):
            kind, body = _BRINGS, b"".join(map(_part_to_bytes, parts))
        case Fail(error):
            kind, body = _FAILS, _error_to_bytes(error)
    whole = _HEAD.pack(_VERSION, kind) + body
    return _CRC.pack(zlib.crc32(whole)) + whole


def entry_from_bytes(value: bytes) -> Entry:
    """Decodes an entry. Raises DamagedEntry if the bytes are not a valid entry."""
    try:
        (crc,) = _CRC.unpack_from(value)
        whole = value[_CRC.size :]
        version, kind = _HEAD.unpack_from(whole)
        if zlib.crc32(whole) != crc or version != _VERSION:
            raise DamagedEntry("the checksum or the version of an entry is wrong")
        return _body(kind, whole[_HEAD.size :])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DamagedEntry(f"an entry cannot be decoded: {error!r}") from error


def _body(kind: int, body: bytes) -> Entry:
    if kind == _BEGINS:
        fingerprint, num_sequences, seed, arrival = _BEGIN.unpack_from(body)
        name = body[_BEGIN.size :].decode()
        return Begin(fingerprint, num_sequences, Identity(name, seed, arrival))
    if kind == _TAKES:
        return Take(body.decode())
    if kind == _BRINGS:
        return Bring(_Parts(body).all())
    if kind == _FAILS:
        return Fail(_error_from_bytes(body))
    raise DamagedEntry(f"an entry has the unknown kind {kind}")


def _part_to_bytes(part: Part) -> bytes:
    index, before, delta = part
    finish = delta.finish
    flags = (
        _HAS_CACHED * (delta.num_cached_tokens is not None)
        | _HAS_LOGPROBS * (delta.logprobs is not None)
        | _HAS_PROMPT_LOGPROBS * (delta.prompt_logprobs is not None)
        | _HAS_FINISH * (finish is not None)
        | _HAS_STOP_TOKEN * (finish is not None and finish.stop_token_id is not None)
    )
    both = (delta.logprobs, delta.prompt_logprobs)
    counts = (before.num_tokens, len(delta.token_ids), before.num_prompt_rows)
    pieces = [
        _PART.pack(index, flags, *counts, delta.num_cached_tokens or 0),
        _to_bytes(array("i", delta.token_ids)),
        *(_rows_to_bytes(rows) for rows in both if rows is not None),
    ]
    if finish is not None:
        reason = finish.reason.value.encode()
        pieces += [_FINISH.pack(len(reason), finish.stop_token_id or 0), reason]
    return b"".join(pieces)


class _Parts:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def all(self) -> list[Part]:
        parts = []
        while self._at < len(self._body):
            parts.append(self._part())
        return parts

    def _part(self) -> Part:
        index, flags, before, num_tokens, rows_before, cached = self._unpack(_PART)
        delta = Delta(self._array("i", num_tokens).tolist())
        if flags & _HAS_LOGPROBS:
            delta.logprobs = self._rows()
        if flags & _HAS_PROMPT_LOGPROBS:
            delta.prompt_logprobs = self._rows()
        if flags & _HAS_CACHED:
            delta.num_cached_tokens = cached
        if flags & _HAS_FINISH:
            length, stop_token_id = self._unpack(_FINISH)
            reason = FinishReason(self._take(length).decode())
            delta.finish = Finish(reason, stop_token_id if flags & _HAS_STOP_TOKEN else None)
        return index, Seen(before, rows_before), delta

    def _rows(self) -> LogprobRows:
        width, num_rows = self._unpack(_ROWS)
        token_ids = self._array("i", width * num_rows)
        logprobs = array("f")
        logprobs.frombytes(self._array("I", width * num_rows).tobytes())
        return LogprobRows(width, token_ids, logprobs, self._array("I", num_rows))

    def _array(self, code: str, count: int) -> "array[int]":
        numbers: array[int] = array(code)
        numbers.frombytes(self._take(4 * count))
        return little_endian(numbers)

    def _unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self._take(layout.size))

    def _take(self, num_bytes: int) -> bytes:
        piece = self._body[self._at : self._at + num_bytes]
        if len(piece) < num_bytes:
            raise DamagedEntry("too short")
        self._at += num_bytes
        return piece


def _rows_to_bytes(rows: LogprobRows) -> bytes:
    bits: array[int] = array("I")
    bits.frombytes(rows.logprobs.tobytes())
    packed = b"".join(map(_to_bytes, (rows.token_ids, bits, rows.ranks)))
    return _ROWS.pack(rows.width, len(rows)) + packed


def _to_bytes(numbers: "array[int]") -> bytes:
    return little_endian(array(numbers.typecode, numbers)).tobytes()


def _error_to_bytes(error: errors.StepwellError) -> bytes:
    known = next(kind for kind in type(error).__mro__ if kind.__name__ in _ERROR_KINDS)
    values = (
        known.__name__,
        {
            "message": error.message,
            "field": error.field,
            "reason": error.error_reason,
            "retry_after_seconds": error.retry_after_seconds,
            "may_retry": error.may_retry,
        },
    )
    return json.dumps(values).encode()


def _error_from_bytes(body: bytes) -> errors.StepwellError:
    kind, values = json.loads(body)
    return _ERROR_KINDS[kind](**values)
