"""The settings of a service: a frozen, flat dataclass, whose fields are set by command-line flags
and environment variables.

The worker's field `max_num_seqs` is the flag `--max-num-seqs` and the variable
`STEPWELL_WORKER_MAX_NUM_SEQS`. A flag overrides a variable, and a variable overrides the default. A
value that does not parse or fails its check ends the process with one sentence and exit status 2.
An unknown flag also ends it, and so does any variable `STEPWELL_…` that no Stepwell program reads,
since a misspelled variable could leave a server open or a limit unset.

A secret, such as a key, can also be read from a file, so that neither the command line nor the
environment shows it. The path of the file is in the variable whose name has the suffix `_FILE`. The
setting's value then is a FileText or FileItems, from which a service can read the file again.
"""

import argparse
import dataclasses
import difflib
import enum
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self, TypeVar

from services.common.process.argument_parser import ArgumentParser
from services.common.process.standard_streams import complain, drop_unwritten


class IsDataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]


_FIELDS = "__dataclass_fields__"
_FILE = "_FILE"
_PROGRAMS = ("gateway", "scheduler", "kvpool", "worker", "up", "download")
_CLIENT_VARIABLES = frozenset(
    f"STEPWELL_{name}"
    for name in ("URL", "API_KEY", "ADMIN_URL", "ADMIN_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE")
)
"""Variables of client and operator commands."""
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

T = TypeVar("T", bound=IsDataclass)
Check = Callable[[Any], str | None]


class FileText(str):
    """The text of a secret's file. The file may be replaced while the service runs."""

    file: Path

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a file. For a list of secrets, each word of the file is one item. Raises OSError or
        UnicodeDecodeError.
        """
        text = cls(",".join(file.read_text().split()))
        text.file = file
        return text


class FileItems(tuple[str, ...]):
    """The items of a list of secrets in a file, which may be replaced while the service runs."""

    file: Path

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a file as `FileText.read` does."""
        items = cls(part for part in FileText.read(file).split(",") if part)
        items.file = file
        return items


class SettingError(ValueError):
    """A setting is invalid. The message has the setting's name and the reason."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    check: Check | None = None,
    is_secret: bool = False,
    read: Callable[[str], Any] | None = None,
) -> Any:
    """Defines a field of a settings class. A setting without a default is required. `check` returns
    what is wrong with a value ("must be at least 1"), or None. A secret can be read from a file.
    `read` parses the value's text. By default the field's type determines how it is parsed. `read`
    raises ValueError with a sentence.
    """
    metadata = {"doc": doc, "check": check, "is_secret": is_secret, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


def with_default(base: type[IsDataclass], name: str, default: Any) -> Any:
    """Defines the field `name` of `base` again, with another default, in a subclass."""
    return dataclasses.field(default=default, metadata=getattr(base, _FIELDS)[name].metadata)


def at_least(low: float) -> Check:
    """Returns a check that a number is at least `low`. NaN fails."""
    return lambda value: None if value >= low else f"must be at least {low:g}"


def between(low: float, high: float) -> Check:
    """Returns a check that a number is in [low, high]. NaN fails."""
    return lambda value: None if low <= value <= high else f"must be from {low:.12g} to {high:.12g}"


def one_of(names: Collection[str]) -> Check:
    """Returns a check that a text is in `names`. Names can still be added to `names` later."""
    return lambda value: None if value in names else f"must be one of {', '.join(names)}"


def not_empty(value: tuple[object, ...]) -> str | None:
    return None if value else "must name at least one"


def existing_directory(value: Path) -> str | None:
    return None if value.is_dir() else "must be a directory that exists"


def existing_file(value: Path) -> str | None:
    return None if value.is_file() else "must be a file that exists"


def load_settings(
    cls: type[T],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    prog: str | None = None,
) -> T:
    """Reads settings as `parse_settings` does. An error ends the process with one sentence."""
    try:
        return parse_settings(cls, service, argv, environ, prog=prog)
    except SettingError as error:
        exit_with(f"stepwell {service}: {error}")


def exit_with(sentence: str, status: int = 2) -> NoReturn:
    """Ends the process with one sentence on standard error."""
    complain(sentence)
    drop_unwritten(sys.stderr)
    raise SystemExit(status)


def parse_settings(
    cls: type[T],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    prog: str | None = None,
) -> T:
    """Reads the settings of `service`, by default from this process's arguments and environment.
    `prog` is the program's name in the help text, by default the service's module. Raises
    SettingError, or SystemExit(0) after --help.
    """
    environ = os.environ if environ is None else environ
    kinds = {name: without_none(hint) for name, hint in typing.get_type_hints(cls).items()}
    flags = vars(_parser(cls, service, kinds, prog).parse_args(argv))
    given = _variables(cls, service, environ)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        flag, variable = flag_name(field.name), variable_name(service, field.name)
        if flags[field.name] is not None:
            values[field.name] = _value(field, flags[field.name], kinds[field.name], flag)
        elif field.name in given:
            values[field.name] = _value(field, given[field.name], kinds[field.name], variable)
        elif field.default is dataclasses.MISSING:
            raise SettingError(f"{flag} (or {variable}) must be given: {field.metadata['doc']}")
    settings = cls(**values)
    validate(settings)
    return settings


def _variables(cls: type[IsDataclass], service: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Maps field names to the values of environment variables. Raises SettingError for a variable
    that no program reads, or a secret's file that cannot be read.
    """
    fields = dataclasses.fields(cls)
    names = {variable_name(service, field.name): field.name for field in fields}
    files = {
        variable_name(service, field.name) + _FILE: field.name
        for field in fields
        if field.metadata.get("is_secret")
    }
    _require_known(service, environ, names.keys() | files.keys())
    texts = {field: environ[name] for name, field in names.items() if name in environ}
    for name, field in files.items():
        if name in environ:
            if field in texts:
                raise SettingError(f"{name} and {name.removesuffix(_FILE)} are both set")
            texts[field] = _secret(name, Path(environ[name]))
    return texts


def _require_known(service: str, environ: Mapping[str, str], known: Collection[str]) -> None:
    others = tuple(env_prefix(program) for program in _PROGRAMS if program != service)
    for name in environ:
        is_others = name.startswith(others) or name in _CLIENT_VARIABLES
        if name.startswith("STEPWELL_") and name not in known and not is_others:
            similar = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"; similar is {similar[0]}" if similar else ""
            raise SettingError(f"{name} is set, but there is no such setting{hint}")


def _secret(variable: str, path: Path) -> FileText:
    try:
        return FileText.read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingError(f"{variable}: {path} cannot be read: {why}") from error


def validate(settings: IsDataclass, named: Callable[[str], str] | None = None) -> None:
    """Runs the check of every field. Raises SettingError for the first failure. In the error, the
    field's name is what `named` returns, by default its flag. The error does not show a secret.
    """
    for field in dataclasses.fields(settings):
        value, check = getattr(settings, field.name), field.metadata.get("check")
        complaint = check(value) if check is not None and value is not None else None
        if complaint is not None:
            name = (named or flag_name)(field.name)
            is_secret = field.metadata.get("is_secret")
            found = "" if is_secret else f", not {as_text(value) or 'nothing'}"
            raise SettingError(f"{name} {complaint}{found}")


def with_values(settings: T, values: Mapping[str, Any], where: str) -> T:
    """Returns a copy of settings with other values for some fields, which are JSON values. Raises
    SettingError, in which `where` comes before the field's name.
    """
    kinds = {
        name: without_none(hint) for name, hint in typing.get_type_hints(type(settings)).items()
    }
    fields = {field.name: field for field in dataclasses.fields(settings)}
    read = {
        name: _value(fields[name], _json_text(value), kinds[name], f"{where}{name}")
        for name, value in values.items()
    }
    changed = dataclasses.replace(settings, **read)
    validate(changed, lambda name: f"{where}{name}")
    return changed


def _json_text(value: Any) -> str:
    """Formats a JSON value as the text that a flag would have."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def variable_name(service: str, field_name: str) -> str:
    return env_prefix(service) + field_name.upper()


def env_prefix(service: str) -> str:
    """The common prefix of the names of a service's environment variables."""
    return f"STEPWELL_{service.upper()}_"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


def _parser(
    cls: type[IsDataclass], service: str, kinds: dict[str, Any], prog: str | None
) -> _Parser:
    description, _, further = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog=prog or f"python -m services.{service}",
        description=description,
        epilog=f"Each flag can also be set as {env_prefix(service)}<NAME>. {further}",
        allow_abbrev=False,
    )
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, _FIELDS, ())}
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited):
        default = _help_text(field.default)
        help_text = field.metadata["doc"] + (f" (default: {default})" if default else "")
        if field.metadata.get("is_secret"):
            help_text += f"; or the content of the file {variable_name(service, field.name)}_FILE"
        options: dict[str, Any] = {"default": None, "help": help_text.replace("%", "%%")}
        if kinds[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(kinds[field.name])
        parser.add_argument(flag_name(field.name), **options)
    return parser


def _help_text(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default in (dataclasses.MISSING, None) else as_text(default)


def _metavar(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return (
        "A,B" if typing.get_origin(kind) else {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
    )


def without_none(hint: Any) -> Any:
    """Returns the type X of a type hint `X | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _value(field: dataclasses.Field[Any], text: str | bool, kind: Any, name: str) -> Any:
    read = field.metadata.get("read")
    if read is None:
        return _convert(text, kind, name)
    try:
        return read(text)
    except ValueError as error:
        raise SettingError(f"{name}: {error}") from error


def _convert(text: str | bool, kind: Any, name: str) -> Any:
    if isinstance(text, bool):
        return text
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise SettingError(f"{name} must be true or false, not {text!r}")
        return _BOOLEANS[text.lower()]
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(text, FileText):
            return FileItems.read(text.file)
        return tuple(_convert(part.strip(), item, name) for part in text.split(",") if part.strip())
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        if issubclass(kind, enum.Enum):
            raise SettingError(f"{name} must be one of {_metavar(kind)}, not {text!r}") from None
        what = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise SettingError(f"{name} must be {what}, not {text!r}") from None


def as_text(value: Any) -> str:
    """Formats a value as the text that a flag or an environment variable would have."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
