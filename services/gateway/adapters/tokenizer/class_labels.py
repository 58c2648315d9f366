"""The names of a classification model's classes."""

import json
from pathlib import Path


def read_class_labels(model: Path) -> tuple[str, ...]:
    """The names in class order, from `id2label` of config.json. Empty unless it has a name for each
    class from 0 on.
    """
    try:
        named = json.loads((model / "config.json").read_bytes()).get("id2label") or {}
        labels = tuple(str(named[str(number)]) for number in range(len(named)))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ()
    return labels
