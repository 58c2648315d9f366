"""Reads prompts from a file of JSON lines with `prompt` or `messages`, or of a JSON list in
ShareGPT's schema. A line may have `output_tokens`, the length of its output, as in vLLM's custom
datasets. An item of ShareGPT has `conversations`, a list of `{"from": "human" or "gpt", "value":
text}`. The human texts become the turns. The recorded outputs are not used.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.bench.core.lengths import Range
from services.cli.bench.core.session import Message, Session, Turn

_HUMAN = ("human", "user")


class DatasetError(ValueError):
    """An invalid dataset. The message names the item and the field."""


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation: the messages of each turn, and the length of each output, if known."""

    turns: tuple[tuple[Message, ...], ...]
    output_tokens: int | None = None


def read_dataset(text: str) -> list[Item]:
    """Reads the items of a file with JSON lines or a JSON list. Raises DatasetError."""
    if text.lstrip().startswith("["):
        items = [_item(f"item {number}", value) for number, value in enumerate(_parse(text), 1)]
    else:
        numbered = enumerate(text.splitlines(), 1)
        items = [
            _item(f"line {number}", _parse(line, f"line {number}"))
            for number, line in numbered
            if line.strip()
        ]
    found = [item for item in items if item.turns]
    if not found:
        raise DatasetError("the file has no prompt")
    return found


def _parse(text: str, where: str = "the file") -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise DatasetError(f"{where} is not JSON") from None


def _item(where: str, value: Any) -> Item:
    if not isinstance(value, dict):
        raise DatasetError(f"{where} is not an object")
    if "conversations" in value:
        return Item(tuple(_share_gpt(where, value["conversations"])))
    output_tokens = value.get("output_tokens")
    if output_tokens is not None and (not isinstance(output_tokens, int) or output_tokens < 1):
        raise DatasetError(f"{where}: output_tokens must be a whole number of at least 1")
    if "messages" in value:
        return Item((tuple(_messages(where, value["messages"])),), output_tokens)
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise DatasetError(f"{where} has neither prompt, messages nor conversations")
    return Item(((Message("user", prompt),),), output_tokens)


def _messages(where: str, values: Any) -> Iterator[Message]:
    for value in _objects(where, "messages", values):
        role, content = value.get("role"), value.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DatasetError(f"{where}: each of messages must have a role and a text as content")
        yield Message(role, content)


def _share_gpt(where: str, values: Any) -> Iterator[tuple[Message, ...]]:
    for value in _objects(where, "conversations", values):
        text = value.get("value")
        if value.get("from") in _HUMAN and isinstance(text, str) and text:
            yield (Message("user", text),)


def _objects(where: str, name: str, values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise DatasetError(f"{where}: {name} must be a list of objects")
    return values


@dataclass(frozen=True, slots=True)
class DatasetLoad:
    """Yields the items of a dataset in order, and repeats them endlessly. `turns` limits the turns
    of conversations. `output_len` is the length of outputs whose length the file does not set.
    """

    items: Sequence[Item]
    turns: Range
    output_len: Range
    think_seconds: Range
    seed: int

    def __iter__(self) -> Iterator[Session]:
        return map(self.session, itertools.count())

    def session(self, number: int) -> Session:
        item = self.items[number % len(self.items)]
        draw = random.Random(f"{self.seed}/session/{number}")
        num_turns = self.turns.whole(draw)
        return Session(
            number,
            [
                self._turn(draw, index, item, messages)
                for index, messages in enumerate(item.turns[:num_turns])
            ],
        )

    def _turn(
        self, draw: random.Random, index: int, item: Item, messages: tuple[Message, ...]
    ) -> Turn:
        output_len = self.output_len.whole(draw)
        think_seconds = self.think_seconds.number(draw) if index else 0.0
        return Turn(messages, item.output_tokens or output_len, think_seconds)
