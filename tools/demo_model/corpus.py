"""The text that the demo model is trained on: the standard library of Python.

Three kinds of document come out of the running interpreter's own standard library, all under the
PSF licence: the source of its modules, the language reference that `help()` prints, and the
interfaces of its modules as names, signatures and docstrings. Conversations made from the same
text are in `chat`. Nothing else is read, nothing is downloaded.

Left out: tests, IDLE, installed packages, generated tables (nothing to learn but numbers) and files
of the build (they hold the paths of the machine). Names of authors and e-mail addresses in their
usual forms are removed, because a language model repeats its training text.
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
    """The library's files, divided once and for all by the seed.

    The model is evaluated on `held_out` files, and never trained on them. Whatever else is derived
    from the library (conversations, interfaces) is derived from the modules of `training` alone.
    """

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def modules_held_out(self) -> frozenset[str]:
        return frozenset(module_name(document.name) for document in self.held_out)


def module_name(path: str) -> str:
    """`email/message.py` is `email.message`, `json/__init__.py` is `json`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def without_credits(text: str) -> str:
    """`text` without its lines of credit, and with a placeholder for each e-mail address."""
    kept = (line for line in text.splitlines(keepends=True) if not CREDIT.match(line))
    return E_MAIL.sub("user@example.com", "".join(kept))


def without_header(source: str) -> str:
    """`source` from its first line of code on. The lines before contain mostly names of people."""
    lines = source.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            return "".join(lines[number:])
    return ""


def read_sources(library: Path) -> list[Document]:
    """Every module under `library` worth reading, in order of path."""
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
    """Holds out whole files, drawn by `seed`, until they make up `held_out_share` of the bytes."""
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
    """The chapters of the language reference that `help("lambda")` and its like print."""
    from pydoc_data.topics import topics  # noqa: PLC0415  # three quarters of a megabyte

    return [Document(f"help/{name}", text.strip() + "\n") for name, text in sorted(topics.items())]


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])
