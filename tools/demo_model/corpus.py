"""The text on which the demo model is trained: the standard library of Python.

The running interpreter's standard library yields three kinds of documents, all under the PSF
licence: the source of its modules, the language reference that `help()` prints, and the interfaces
of its modules as names, signatures and docstrings. `chat` makes conversations from the same text.
Nothing is downloaded.

The following is left out: tests, IDLE, installed packages, generated tables, which contain only
numbers, and files of the build, which contain paths of the machine. Names of authors and e-mail
addresses in their usual forms are removed, because a language model repeats its training text.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = frozenset({
    "test", "tests", "idlelib", "site-packages", "__pycache__", "pydoc_data", "msilib",
    "_bundled", "__phello__",
})  # fmt: skip
EXCLUDED_FILES = re.compile(r"^(_sysconfigdata.*|sitecustomize|usercustomize|entities)\.py$")
GENERATED_TABLE = re.compile(r"^(decoding_table|_decoding_table|decoding_map)\b", re.MULTILINE)
LARGEST_FILE_BYTES = 240_000

E_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
CREDIT = re.compile(
    r"^\s*(#.*\b(author|copyright|©|written by|contributed by|maintain\w*|modified by|"
    r"created by|licensed to)\b|__(author|credits|copyright|maintainer|email)__\s*=|"
    r"[\s#:*.\"-]*(\(c\)|authors?:|copyright|written by|contributed by|modified by)|"
    r".*\b(was|is|were) written by (?-i:[A-Z]))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Document:
    """One training text, up to `<|endoftext|>`. `name` is its source."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """The library's source files, divided into `training` and `held_out`.

    The model is evaluated on `held_out` files, and never trained on them. Conversations and
    interfaces come only from the modules of `training`.
    """

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def modules_held_out(self) -> frozenset[str]:
        return frozenset(module_name(document.name) for document in self.held_out)


def module_name(path: str) -> str:
    """Converts `email/message.py` to `email.message`, and `json/__init__.py` to `json`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def without_credits(text: str) -> str:
    """Removes lines that name authors, and replaces e-mail addresses with a placeholder."""
    kept = (line for line in text.splitlines(keepends=True) if not CREDIT.match(line))
    return E_MAIL.sub("user@example.com", "".join(kept))


def without_header(source: str) -> str:
    """Removes the lines before the first line of code. They contain mostly names of people."""
    lines = source.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            return "".join(lines[number:])
    return ""


def read_sources(library: Path) -> list[Document]:
    """All modules under `library` that are not left out, sorted by path."""
    documents = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or EXCLUDED_FILES.match(path.name):
            continue
        if any(part.startswith("config-") for part in relative.parts):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        if len(source) > LARGEST_FILE_BYTES or GENERATED_TABLE.search(source):
            continue
        text = without_credits(without_header(source)).strip()
        if len(text) > 200:
            documents.append(Document(relative.as_posix(), text + "\n"))
    return documents


def split_sources(documents: list[Document], seed: int, held_out_share: float) -> SourceSplit:
    """Holds out random files until they have the fraction `held_out_share` of all bytes."""
    order = sorted(documents, key=lambda document: document.name)
    random.Random(seed).shuffle(order)
    wanted = held_out_share * sum(len(document.text) for document in order)
    taken = 0
    count = 0
    while taken < wanted:
        taken += len(order[count].text)
        count += 1
    return SourceSplit(training=tuple(order[count:]), held_out=tuple(order[:count]))


def language_reference() -> list[Document]:
    """The chapters of the language reference, which calls such as `help("lambda")` print."""
    from pydoc_data.topics import topics  # noqa: PLC0415  # three quarters of a megabyte

    return [Document(f"help/{name}", text.strip() + "\n") for name, text in sorted(topics.items())]


def standard_library() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])
