"""Imports modules of transformers without its list of all models.

AutoTokenizer itself is needed: a tokenizer.json alone does not say which tokens a text has, since
the classes of some models build their tokenizers anew. But the package's own code, and that of
`transformers.models`, read the source files of every model for the names that they define, so that
these can be imported from the package. That takes twice as long as to import what a tokenizer
needs, by the names of its modules.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_PACKAGES = ("transformers", "transformers.models")


class _ListedLater(ModuleType):
    """Stands in sys.modules for a package. The package itself is imported when a name is looked up
    that is neither a module imported so far nor a tokenizer's class.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            module = _module_of_tokenizer(name)
            if module is not None:
                return getattr(module, name)
            del sys.modules[self.__name__]
            import_module(self.__name__)
        return getattr(sys.modules[self.__name__], name)


def _module_of_tokenizer(name: str) -> ModuleType | None:
    """The module in which AutoTokenizer finds a class by way of the package: that of a model of the
    same name, if there is one.
    """
    stem = name.removesuffix("Tokenizer").lower()
    path = "tokenization_python" if stem == "pretrained" else f"models.{stem}"
    if not name.endswith("Tokenizer") or find_spec(f"transformers.{path}") is None:
        return None
    module = import_module(f"transformers.{path}")
    return module if name in dir(module) else None


def import_auto_tokenizer() -> Any:
    """The class AutoTokenizer. What else is imported from transformers, before or later, is found
    as always. A version whose modules have other names is imported as a whole.
    """
    for package in _PACKAGES:
        spec = None if package in sys.modules else find_spec(package)
        if spec is not None:
            module = sys.modules[package] = module_from_spec(spec)
            module.__class__ = _ListedLater
            module.__dict__["__version__"] = version("transformers")
    try:
        import_module("transformers.dependency_versions_check")  # as the package does first
        return import_module("transformers.models.auto.tokenization_auto").AutoTokenizer
    except (ImportError, AttributeError):
        for package in _PACKAGES:
            if isinstance(sys.modules.get(package), _ListedLater):
                del sys.modules[package]
        return import_module("transformers").AutoTokenizer
