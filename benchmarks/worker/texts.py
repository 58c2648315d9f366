"""Texts that models are told to write, by the tokens of the demo model: prompts and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
LONGEST_PROMPT = 700


@dataclass(frozen=True, slots=True)
class Text:
    """What is written: the tokens of a prompt, and of an answer to it."""

    name: str
    prompt: list[int]
    answer: list[int]


def texts(num_tokens: int) -> list[Text]:
    """An edit, an extraction, a continuation, random tokens, what misleads."""
    program = (ROOT / "services/worker/core/layout.py").read_text()
    records = [
        {"id": 1000 + 37 * number, "name": name, "city": city, "paid": number % 3 == 0}
        for number, (name, city) in enumerate(zip(_NAMES, _CITIES, strict=True))
    ]
    lines = "\n".join(map(json.dumps, records))
    found = "\n".join(json.dumps({"name": of["name"], "city": of["city"]}) for of in records)
    page = (ROOT / "docs/architecture.md").read_text().partition("## What fails how")[2]
    drawn = np.random.default_rng(7).permutation(4000)[:600].tolist()
    misleading = [token for own in drawn[:200] for token in (4001, 4002, own)]
    start = "class SamplingRequests"
    edited = program[program.index(start) :]
    edited = edited.replace("firsts", "beginnings").replace("counts", "numbers")
    prompt = program[program.index("@dataclass(frozen=True, slots=True)\nclass Sampling") :]
    third = len(page) // 3
    every = [
        Text("edit of a program", _tokens(prompt)[-LONGEST_PROMPT:], _tokens(edited)),
        Text("extraction from JSON", _tokens(lines), _tokens(found)),
        Text("continuation of prose", _tokens(page[:third]), _tokens(page[third:])),
        Text("random tokens", drawn[:300], drawn[300:]),
        Text("what misleads", misleading[:300], misleading[300:]),
    ]
    return [replace(text, answer=text.answer[:num_tokens]) for text in every]


def _tokens(text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


_NAMES = (
    *("Ada Byron", "Alan Kay", "Barbara Liskov", "Edsger Dijkstra", "Grace Hopper"),
    *("John Backus", "Ken Iverson", "Leslie Lamport", "Niklaus Wirth", "Radia Perlman"),
)
_CITIES = (
    *("London", "Springfield", "Los Angeles", "Rotterdam", "New York"),
    *("Philadelphia", "Camrose", "Brooklyn", "Winterthur", "Portsmouth"),
)
