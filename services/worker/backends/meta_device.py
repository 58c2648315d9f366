"""Imports torch without its support of the device "meta", whose tensors have shapes and no memory.

torch implements that device's operations in Python, and imports them when it is imported itself: a
quarter of the time that takes, and 18 MB. Native models have no such tensors. Models of
transformers begin as such, and what torch compiles is traced with them.
"""

import sys
from importlib import import_module
from types import ModuleType

_IMPLEMENTATION = "torch._meta_registrations"


def import_torch() -> None:
    """Imports torch without it; does nothing if torch was imported before."""
    if "torch" not in sys.modules:
        sys.modules[_IMPLEMENTATION] = ModuleType(_IMPLEMENTATION)
        import_module("torch")


def support_meta_device() -> None:
    """Imports what `import_torch` left out."""
    if sys.modules[_IMPLEMENTATION].__spec__ is None:
        del sys.modules[_IMPLEMENTATION]
        import_module(_IMPLEMENTATION)
