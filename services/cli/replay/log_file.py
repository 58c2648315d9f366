"""Reads a step log file: JSON lines, which may be compressed. The first line is a header."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from services.cli.errors import CommandError
from services.cli.replay.fields import Field, FieldError, parse_json
from services.cli.replay.groups import MAX_GROUPS, read_group, require_a_pool
from services.cli.replay.settings import read_config
from services.common.errors import StepwellError
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.step_log.log_entry import SCHEMA, TIMED_VERSION, VERSION

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a log: the configuration that a replay needs besides the logged calls."""

    model_name: str
    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class Line:
    """A line after the header: its number in the file, and its parsed JSON."""

    number: int
    entry: Field


class StepLogFile:
    """The header and the entries of a file. Each entry is parsed when the iteration reaches it. The
    file may end within a line or a compressed frame, because its writer was killed, is still
    writing, or ran out of disk space. The iteration then ends at the last complete line. Other
    damage raises CommandError, which names line and field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_line: int | None = None
        """The number of the incomplete line at the end of the file. None if the last line is
        complete, or if the file has not been read to its end.
        """
        self._lines = self._parsed_lines()
        first = next(self._lines, None)
        if first is None and self.cut_line is not None:
            raise self._damaged(1, "is cut off: there is no header")
        if first is None:
            raise CommandError(f"{path} line 1 is missing: there is no header")
        self.header_line = first
        with self.naming(first):
            self.header = read_header(first.entry)

    def __iter__(self) -> Iterator[Line]:
        return self._lines

    @contextmanager
    def naming(self, line: Line) -> Iterator[None]:
        """Converts errors in the `with` block to CommandErrors that name the file and the line."""
        try:
            yield
        except FieldError as error:
            raise CommandError(f"{self.path} line {line.number}: {error}") from None
        except StepwellError as error:
            where = f"{error.field}: " if error.field else ""
            raise CommandError(f"{self.path} line {line.number}: {where}{error.message}") from None

    def _parsed_lines(self) -> Iterator[Line]:
        for number, text in self._raw_lines():
            if not text.endswith(b"\n"):
                self.cut_line = number
                return
            yield Line(number, Field(parse_json(text.rstrip(b"\n"), self.path, number)))

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        with _open_file(self.path) as file:
            try:
                for number, text in enumerate(_decompressed_lines(file), start=1):
                    yield number, text
            except OSError as error:
                raise self._damaged(number + 1, f"cannot be read: {error.strerror}") from None
            except ValueError as error:
                raise self._damaged(number + 1, f"cannot be decompressed: {error}") from None

    def _damaged(self, number: int, complaint: str) -> CommandError:
        return CommandError(f"{self.path} line {number} {complaint}")


def _open_file(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None


def _decompressed_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, which are decompressed if necessary. Raises ValueError for damage."""
    magic = file.read(len(_ZSTD_MAGIC))
    file.seek(0)
    if magic != _ZSTD_MAGIC:
        yield from file
        return
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError:
        raise CommandError(
            "a compressed log needs zstandard: pip install 'stepwell[zstd]'"
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    try:
        yield from io.BufferedReader(reader)
    except zstandard.ZstdError as error:
        raise ValueError(error) from None


def read_header(top: Field) -> Header:
    top["schema"].one_of([SCHEMA])
    if top["version"].integer(1) not in (VERSION, TIMED_VERSION):
        raise top["version"].wrong(
            f"must be {VERSION} or {TIMED_VERSION}: logs of other versions mean something else"
        )
    fingerprint = top["fingerprint"]
    try:
        root = bytes.fromhex(fingerprint.text())
    except ValueError:
        raise fingerprint.wrong("must be hexadecimal") from None
    config = read_config(top["config"], root)
    pool = top["pool"]
    pool["num_blocks"].integer(config.num_blocks, config.num_blocks)
    groups = tuple(read_group(group) for group in pool["groups"].items())
    if not 0 < len(groups) <= MAX_GROUPS:
        raise pool["groups"].wrong(f"must list 1 to {MAX_GROUPS} groups")
    config = replace(config, groups=groups)
    require_a_pool(config, pool)
    return Header(top["model_name"].text(), config)
