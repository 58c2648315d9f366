"""A JSON object from a model directory. Errors name the file, the key and the problem."""

import json
from pathlib import Path
from typing import Any

from services.worker.models.errors import ModelConfigError, ModelFileError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelFileError if the file is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(path, "the file is missing") from None
    except OSError as error:
        raise ModelFileError(path, f"the file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"the file is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"the file must hold a JSON object, not {type(value).__name__}")
    return value


_MOST_PARTS = 65_536


class JsonReader:
    """Typed access to a JSON object. A null value counts as absent.

    Every accessor raises ModelConfigError for a value of the wrong type, and for an absent key
    without a default.
    """

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def is_null(self, key: str) -> bool:
        """Whether the key is present with the value null, which may differ from absence."""
        return key in self._nulls

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Returns a whole number of `least` or more."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"must be a whole number of {least} or more, not {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a number of parts, such as layers, for each of which there will be objects."""
        value = self.integer(key, default)
        if value > _MOST_PARTS:
            raise self.error(key, f"must be {_MOST_PARTS} or less, not {value}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def nullable_float(self, key: str, default: float | None) -> float | None:
        """A finite number above 0, None if the value is null, or `default` if the key is absent."""
        if self.is_null(key) or (key not in self and default is None):
            return None
        return self.positive_float(key, default)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def nested(self, key: str) -> "JsonReader":
        """Returns a nested object, or an empty one if the key is absent."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return JsonReader(self.path, value, f"{self._prefix}{key}.")

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns a whole number or a list of them as a tuple, empty if the key is absent."""
        value = self._values.get(key, [])
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(numbers)

    def raw(self, key: str) -> Any:
        """The unchecked value. It is None if the key is absent."""
        return self._values.get(key)

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(self.path, f"{self._prefix}{key} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value
