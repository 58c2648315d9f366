"""Settings are read from flags and the environment. A wrong setting is an error of one sentence."""

import dataclasses
import enum
import importlib
import re
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from services.common.process.settings import (
    FileItems,
    SettingError,
    at_least,
    between,
    existing_directory,
    flag_name,
    load_settings,
    not_empty,
    parse_settings,
    setting,
    variable_name,
    with_default,
)
from services.common.redis.url import is_redis_url


class Colour(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@dataclass(frozen=True, slots=True)
class Everything:
    """A setting of each kind.

    What else there is to say.
    """

    name: str = setting(doc="who it is")
    count: int = setting(3, doc="how many, in %", check=at_least(1))
    share: float = setting(0.5, doc="how much of it", check=between(0, 1))
    colour: Colour = setting(Colour.RED, doc="which colour")
    fast: bool = setting(True, doc="whether to hurry")
    hosts: tuple[str, ...] = setting(("a",), doc="where", check=not_empty)
    ports: tuple[int, ...] = setting((), doc="which ports")
    limit: int | None = setting(None, doc="how many at most", check=at_least(10))
    folder: Path = setting(Path(), doc="where it lies", check=existing_directory)
    words: tuple[str, ...] = setting((), doc="what opens it", is_secret=True)
    url: str | None = setting(None, doc="whom to ask", check=is_redis_url, is_secret=True)


def parse(*argv: str, **environ: str) -> Everything:
    return parse_settings(Everything, "thing", argv, environ)


def test_what_is_not_given_has_its_default() -> None:
    settings = parse("--name", "x")
    assert settings == Everything(name="x")
    assert (settings.count, settings.colour, settings.limit) == (3, Colour.RED, None)


def test_flags_are_read_by_the_type_of_their_setting() -> None:
    settings = parse(
        *("--name", "x", "--count", "7", "--share", "0.25", "--colour", "dark-blue"),
        *("--no-fast", "--hosts", "a:1, b:2", "--ports", "1,2", "--limit", "10"),
        *("--folder", "/"),
    )
    assert settings == Everything(
        "x", 7, 0.25, Colour.DARK_BLUE, False, ("a:1", "b:2"), (1, 2), 10, Path("/")
    )


def test_variables_are_read_and_those_of_others_ignored() -> None:
    settings = parse(
        STEPWELL_THING_NAME="x",
        STEPWELL_THING_COUNT="7",
        STEPWELL_THING_COLOUR="dark-blue",
        STEPWELL_THING_FAST="No",
        STEPWELL_THING_PORTS="1,2",
        UNRELATED="1",
        STEPWELL_URL="http://127.0.0.1:8000",
        STEPWELL_GATEWAY_MODEL="y",
    )
    assert settings == Everything("x", 7, colour=Colour.DARK_BLUE, fast=False, ports=(1, 2))


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("ON", True), ("off", False), ("0", False)]
)
def test_booleans_have_several_names(text: str, value: bool) -> None:
    assert parse("--name", "x", STEPWELL_THING_FAST=text).fast is value


def test_a_secret_is_the_content_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("sesame\nfriend\n")
    settings = parse("--name", "x", STEPWELL_THING_WORDS_FILE=str(path))
    assert settings.words == ("sesame", "friend")
    assert isinstance(settings.words, FileItems)
    assert settings.words.file == path
    path.write_text("sesame,friend\n")
    assert parse("--name", "x", STEPWELL_THING_WORDS_FILE=str(path)) == settings
    given = parse("--name", "x", "--words", "door", STEPWELL_THING_WORDS_FILE=str(path))
    assert given.words == ("door",)


@pytest.mark.parametrize("program", ["gateway", "scheduler", "kvpool", "worker", "up"])
def test_every_secret_of_a_program_can_be_a_file(program: str, tmp_path: Path) -> None:
    """The secrets are the API keys, and the URLs, which may contain passwords."""
    cls, file = _settings_class("cli" if program == "up" else program), tmp_path / "secret"
    file.write_text("redis://:word@redis:6379\n")
    fields = dataclasses.fields(cls)
    secrets = {field.name for field in fields if field.metadata.get("is_secret")}
    assert secrets == {field.name for field in fields if re.search("_keys?$|_url$", field.name)}
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    values = {"model": str(Path(__file__).parents[4] / "models" / "demo")}
    argv = [text for name in required for text in (flag_name(name), values.get(name, "host:1"))]
    for name in secrets:
        environ = {f"{variable_name(program, name)}_FILE": str(file)}
        settings = parse_settings(cls, program, argv, environ)
        assert "redis://:word@redis:6379" in getattr(settings, name), name


def test_an_error_does_not_show_a_secret(tmp_path: Path) -> None:
    """A password with a slash that is not quoted is the most frequent mistake in a URL."""
    (tmp_path / "url").write_text("redis://user:pass/word@host:6379")
    with pytest.raises(SettingError) as caught:
        parse("--name", "x", STEPWELL_THING_URL_FILE=str(tmp_path / "url"))
    assert str(caught.value).startswith("--url must be redis://[user:password@]host:port")
    assert "word@host" not in str(caught.value)


def test_a_flag_wins_over_a_variable() -> None:
    assert parse("--name", "flag", STEPWELL_THING_NAME="variable").name == "flag"
    assert parse("--name", "x", "--fast", STEPWELL_THING_FAST="0").fast


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        ([], {}, "--name (or STEPWELL_THING_NAME) must be given: who it is"),
        (["--name", "x", "--count", "0"], {}, "--count must be at least 1, not 0"),
        (["--name", "x", "--count", "many"], {}, "--count must be a whole number, not 'many'"),
        (
            ["--name", "x"],
            {"STEPWELL_THING_COUNT": "1.5"},
            "STEPWELL_THING_COUNT must be a whole number, not '1.5'",
        ),
        (["--name", "x", "--share", "x"], {}, "--share must be a number, not 'x'"),
        (["--name", "x", "--share", "1.5"], {}, "--share must be from 0 to 1, not 1.5"),
        (["--name", "x", "--share", "nan"], {}, "--share must be from 0 to 1, not nan"),
        (["--name", "x", "--limit", "9"], {}, "--limit must be at least 10, not 9"),
        (
            ["--name", "x", "--colour", "green"],
            {},
            "--colour must be one of red|dark-blue, not 'green'",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THING_FAST": "maybe"},
            "STEPWELL_THING_FAST must be true or false, not 'maybe'",
        ),
        (["--name", "x", "--hosts", ","], {}, "--hosts must name at least one, not nothing"),
        (["--name", "x", "--ports", "1,b"], {}, "--ports must be a whole number, not 'b'"),
        (
            ["--name", "x", "--folder", "/nowhere/at/all"],
            {},
            "--folder must be a directory that exists, not /nowhere/at/all",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THING_COLOR": "red"},
            "STEPWELL_THING_COLOR is set, but there is no such setting; similar is "
            "STEPWELL_THING_COLOUR",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THIGN_WORDS": "open"},
            "STEPWELL_THIGN_WORDS is set, but there is no such setting; similar is "
            "STEPWELL_THING_WORDS",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_ELSEWHERE": "1"},
            "STEPWELL_ELSEWHERE is set, but there is no such setting",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THING_NAME_FILE": "/etc/hostname"},
            "STEPWELL_THING_NAME_FILE is set, but there is no such setting; similar is "
            "STEPWELL_THING_NAME",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THING_WORDS_FILE": "/nowhere"},
            "STEPWELL_THING_WORDS_FILE: /nowhere cannot be read: No such file or directory",
        ),
        (
            ["--name", "x"],
            {"STEPWELL_THING_WORDS_FILE": "/nowhere", "STEPWELL_THING_WORDS": "open"},
            "STEPWELL_THING_WORDS_FILE and STEPWELL_THING_WORDS are both set",
        ),
        (["--name", "x", "--nam", "y"], {}, "unrecognized arguments: --nam y; similar are --name"),
        (["--name", "x", "--zzz=1"], {}, "unrecognized arguments: --zzz=1"),
        (["x"], {}, "unrecognized arguments: x; a value follows its flag, see --help"),
        (["--name"], {}, "argument --name: expected one argument"),
    ],
)
def test_every_mistake_is_one_sentence(
    argv: list[str], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingError) as refused:
        parse(*argv, **environ)
    assert str(refused.value) == sentence


def test_a_bad_setting_ends_the_process_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(Everything, "thing", ["--name", "x", "--count", "0"], {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == "stepwell thing: --count must be at least 1, not 0\n"


def test_help_names_every_flag_its_values_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "A setting of each kind.",
        "--count N how many, in % (default: 3)",
        "--colour red|dark-blue which colour (default: red)",
        "--fast, --no-fast whether to hurry (default: yes)",
        "--hosts A,B where (default: a)",
        "--limit N how many at most",
        "Each flag can also be set as STEPWELL_THING_<NAME>. What else there is to say.",
    ):
        assert part in text


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    port: int = setting(doc="where", check=at_least(1))
    noise: int = setting(1, doc="how loud")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Base):
    """Settings of one service, which extend the settings of all services."""

    port: int = with_default(Base, "port", 7)
    special: str = setting(doc="what only this one has")


def test_a_service_gives_a_setting_of_its_base_another_default() -> None:
    settings = parse_settings(Extended, "thing", ["--special", "x"], {})
    assert settings == Extended(special="x", port=7, noise=1)
    with pytest.raises(SettingError, match="--port must be at least 1, not 0"):
        parse_settings(Extended, "thing", ["--special", "x", "--port", "0"], {})
    with pytest.raises(SettingError, match=r"--port .* must be given: where"):
        parse_settings(Base, "thing", [], {})


def test_help_lists_what_is_special_to_a_service_before_what_every_service_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Extended, "thing", ["--help"], {})
    text = capsys.readouterr().out
    assert text.index("--special TEXT") < text.index("--port N") < text.index("--noise N")


def test_settings_do_not_change() -> None:
    settings = parse("--name", "x")
    with pytest.raises(FrozenInstanceError):
        settings.count = 5


@pytest.mark.parametrize("service", ["scheduler", "kvpool", "worker", "gateway", "cli"])
def test_every_service_lists_its_settings_and_passes_its_own_checks(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"services.{service}.settings")
    classes = [
        kind
        for name, kind in vars(module).items()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    assert classes
    for kind in classes:
        with pytest.raises(SystemExit):
            parse_settings(kind, service, ["--help"], {})
        text = capsys.readouterr().out
        for field in dataclasses.fields(kind):
            assert flag_name(field.name) in text
            assert field.metadata["doc"]
            check = field.metadata["check"]
            if check is not None and field.default not in (dataclasses.MISSING, None):
                assert check(field.default) is None, field.name


def test_no_two_services_listen_on_one_port_by_default() -> None:
    addresses = [
        field.default.rpartition(":")[2]
        for service in ("gateway", "scheduler", "kvpool", "worker")
        for field in dataclasses.fields(_settings_class(service))
        if field.name in ("address", "http_address")
    ]
    assert len(addresses) == 5
    assert len(set(addresses)) == 5


def _settings_class(service: str) -> type:
    module = importlib.import_module(f"services.{service}.settings")
    name = "up" if service == "cli" else service
    (found,) = (kind for key, kind in vars(module).items() if key.lower() == f"{name}settings")
    return found
