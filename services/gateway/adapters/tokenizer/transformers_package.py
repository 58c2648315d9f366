"""Imports modules of transformers without scanning the source files of all models.

AutoTokenizer is needed, because a tokenizer.json alone does not determine the tokens: the tokenizer
classes of some models construct the tokenizer anew, and AutoTokenizer chooses the class. But the
usual import of `transformers` and `transformers.models` reads the source files of every model to
list their names, and takes twice as long as importing only the modules that a tokenizer needs.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_PACKAGES = ("transformers", "transformers.models")


class _ListedLater(ModuleType):
    """A placeholder in sys.modules for a package. Provides the package's imported modules and
    tokenizer classes as attributes. The package itself is imported when another one is used.
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
    """Returns the module of the tokenizer class `name`, which AutoTokenizer looks up in the
    package. The model's name is derived from `name`. Returns None if there is no such module.
    """
    stem = name.removesuffix("Tokenizer").lower()
    path = "tokenization_python" if stem == "pretrained" else f"models.{stem}"
    if not name.endswith("Tokenizer") or find_spec(f"transformers.{path}") is None:
        return None
    module = import_module(f"transformers.{path}")
    return module if name in dir(module) else None


def import_auto_tokenizer() -> Any:
    """Returns the class AutoTokenizer. Does not affect other imports from transformers. If the
    modules have other names in the installed version, imports the whole package.
    """
    for package in _PACKAGES:
        spec = None if package in sys.modules else find_spec(package)
        if spec is not None:
            module = sys.modules[package] = module_from_spec(spec)
            module.__class__ = _ListedLater
            module.__dict__["__version__"] = version("transformers")
    try:
        import_module("transformers.dependency_versions_check")  # as the package itself does first
        return import_module("transformers.models.auto.tokenization_auto").AutoTokenizer
    except (ImportError, AttributeError):
        for package in _PACKAGES:
            if isinstance(sys.modules.get(package), _ListedLater):
                del sys.modules[package]
        return import_module("transformers").AutoTokenizer
