"""Loads classes of other packages, which settings name as `package.module:Class`."""

import sys
from collections.abc import Collection
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from services.common.process.settings import Check


class NotLoadable(ValueError):
    """A class cannot be loaded. The message continues a sentence that begins with the setting."""


def is_outside(name: str) -> bool:
    return ":" in name


@lru_cache
def load_class(name: str, *members: str) -> type:
    """Returns the class `package.module:Class`. It must have the attributes `members`. The module
    may be in the current directory, as with `python -m`. Raises NotLoadable.
    """
    module_name, _, class_name = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:  # importing a module can raise any error
        why = str(error) or type(error).__name__
        raise NotLoadable(f"must name a class that can be imported ({why})") from error
    missing = [member for member in members if not hasattr(found, member)]
    if not isinstance(found, type) or missing:
        wanted = ", ".join(missing) or "a class"
        raise NotLoadable(f"must name a class with its interface ({class_name} lacks {wanted})")
    return found


def one_of_or_class(names: Collection[str], *members: str) -> Check:
    """Returns a check that a text is in `names`, or names a class with the attributes `members`."""

    def check(value: str) -> str | None:
        if value in names:
            return None
        if not is_outside(value):
            return f"must be one of {', '.join(names)}"
        try:
            load_class(value, *members)
        except NotLoadable as error:
            return str(error)
        return None

    return check
