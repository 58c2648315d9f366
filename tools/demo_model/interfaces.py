"""The public interfaces of the standard library: qualified names, signatures and docstrings.

They are read from the imported modules, not from the modules' source, because source files lack the
documentation of code written in C (`math`, `itertools`, the methods of `str`), and because people
ask for `os.path.join`, not for `posixpath.join`.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from tools.demo_model.corpus import Document, without_credits

# Importing these opens a browser, prints a poem, needs a display or is overridden by packages.
NOT_IMPORTED = frozenset({
    "antigravity", "this", "idlelib", "turtledemo", "turtle", "tkinter", "lib2to3", "distutils",
    "test", "encodings", "ensurepip", "msilib", "pydoc_data", "sitecustomize", "usercustomize",
})  # fmt: skip
KNOWN_AS = {"posixpath": "os.path", "builtins": ""}
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Interface:
    """The documentation of one public function, class or method. `signature` may be empty."""

    module: str
    name: str
    signature: str
    documentation: str


def importable_modules() -> Iterator[ModuleType]:
    """Yields the public modules of the standard library that can be imported on this platform."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in NOT_IMPORTED:
            continue
        module = _imported(name)
        if module is None:
            continue
        yield module
        for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
            if not found.name.startswith(("_", "test")):
                inner = _imported(f"{name}.{found.name}")
                if inner is not None:
                    yield inner


def interfaces_of(module: ModuleType) -> Iterator[Interface]:
    """Yields the documented public functions, classes and methods that `module` defines."""
    prefix = KNOWN_AS.get(module.__name__, module.__name__)
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    for name in sorted(set(names)):
        thing = getattr(module, name, None)
        if not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue
        origin = getattr(thing, "__module__", None) or module.__name__
        if origin.lstrip("_").split(".")[0] != module.__name__.lstrip("_").split(".")[0]:
            continue  # imported from another module, which yields it
        qualified = f"{prefix}.{name}" if prefix else name
        yield from _interface(module, qualified, thing)
        if inspect.isclass(thing):
            for member, value in sorted(vars(thing).items()):
                if not member.startswith("_") and inspect.isroutine(value):
                    yield from _interface(module, f"{qualified}.{member}", value)


def interface_documents(interfaces: Iterable[Interface]) -> list[Document]:
    """One document for each module, with its interfaces in the format of `pydoc`."""
    pages: dict[str, list[str]] = {}
    for interface in interfaces:
        body = interface.documentation.replace("\n", "\n    ")
        entry = f"{interface.name}{interface.signature}\n    {body}\n"
        pages.setdefault(interface.module, [f"Help on module {interface.module}:\n"]).append(entry)
    return [Document(f"interface/{name}", "\n".join(page)) for name, page in pages.items()]


def all_interfaces(modules_held_out: frozenset[str]) -> list[Interface]:
    """Every interface of the library, except interfaces of held-out modules."""
    assert builtins.__doc__  # python -OO has no docstrings to learn from
    return [
        interface
        for module in importable_modules()
        if module.__name__ not in modules_held_out
        for interface in interfaces_of(module)
    ]


def _imported(name: str) -> ModuleType | None:
    """The module, or None if this platform does not have it."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit):
            return None


def _interface(module: ModuleType, name: str, thing: object) -> Iterator[Interface]:
    documentation = without_credits(inspect.getdoc(thing) or "").strip()
    if len(documentation) >= 20:
        yield Interface(module.__name__, name, _signature(thing), documentation)


def _signature(thing: object) -> str:
    """The signature without addresses. The text is empty for long signatures and local paths."""
    try:
        text = ADDRESS.sub("", str(inspect.signature(thing)))  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError, NameError):  # C code may have no signature
        return ""
    return "" if sys.prefix in text or len(text) > 200 else text
