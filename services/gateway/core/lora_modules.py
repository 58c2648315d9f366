"""The LoRA adapters that clients may request by name in place of the model."""

from collections.abc import Iterator

from services.common.errors import InvalidArgument, NotFound
from services.common.request.adapter import Adapter

MAX_NAME_CHARACTERS = 256
"""Limit on the length of an adapter's name, which appears in answers, logs and metrics."""


class LoraModules:
    """The loaded adapters by name. No adapter has the model's name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._adapters: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def find(self, name: str | None) -> Adapter | None:
        return None if name is None else self._adapters.get(name)

    def check_new(self, name: str, *, in_place: bool = False) -> None:
        """Raises InvalidArgument if a name is empty, too long, not printable, or the model's name.
        If `in_place` is false, also raises InvalidArgument for the name of a loaded adapter.
        """
        if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):
            raise InvalidArgument(
                f"lora_name must be 1 to {MAX_NAME_CHARACTERS} printable characters",
                field="lora_name",
            )
        if name == self._model_name:
            raise InvalidArgument(f"lora_name: {name!r} is the model's name", field="lora_name")
        if name in self._adapters and not in_place:
            raise InvalidArgument(
                f"lora_name: the adapter {name!r} has already been loaded; load_inplace loads "
                "it again",
                field="lora_name",
            )

    def add(self, adapter: Adapter, *, in_place: bool = False) -> None:
        """Adds an adapter. Raises InvalidArgument if `check_new` does not accept the name."""
        self.check_new(adapter.name, in_place=in_place)
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Removes an adapter. Running requests that use the adapter continue. Raises NotFound if
        the name is unknown.
        """
        if self._adapters.pop(name, None) is None:
            raise NotFound(
                f"no adapter {name[:100]!r} is loaded",
                field="lora_name",
                reason="ADAPTER_NOT_FOUND",
            )
