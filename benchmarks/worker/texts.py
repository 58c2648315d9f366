"""Texts that models are made to write: prompts and answers in tokens of the demo model."""

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
    """A prompt and its answer, both as token ids."""

    name: str
    prompt: list[int]
    answer: list[int]


def texts(num_tokens: int) -> list[Text]:
    """The texts: an edit, an extraction, a continuation, random tokens, and a misleading text."""
    program = (ROOT / "services/worker/core/batch/layout.py").read_text()
    records = [
        {"id": 1000 + 37 * number, "name": name, "city": city, "paid": number % 3 == 0}
        for number, (name, city) in enumerate(zip(_NAMES, _CITIES, strict=True))
    ]
    lines = "\n".join(map(json.dumps, records))
    found = "\n".join(json.dumps({"name": of["name"], "city": of["city"]}) for of in records)
    prose = _tokens((ROOT / "docs/architecture.md").read_text())
    drawn = np.random.default_rng(7).permutation(4000)[:600].tolist()
    misleading = [token for own in drawn[:200] for token in (4001, 4002, own)]
    start = "class SamplingRequests"
    edited = program[program.index(start) :]
    edited = edited.replace("firsts", "beginnings").replace("counts", "numbers")
    prompt = program[program.index("@dataclass(frozen=True, slots=True)\nclass Sampling") :]
    every = [
        Text("edit of a program", _tokens(prompt)[-LONGEST_PROMPT:], _tokens(edited)),
        Text("extraction from JSON", _tokens(lines), _tokens(found)),
        Text("continuation of prose", prose[:LONGEST_PROMPT], prose[LONGEST_PROMPT:]),
        Text("random tokens", drawn[:300], drawn[300:]),
        Text("what misleads", misleading[:300], misleading[300:]),
    ]
    return [replace(text, answer=text.answer[:num_tokens]) for text in every]


def agent_steps(num_tokens: int) -> list[Text]:
    """Steps of an agent that works on a program.

    Each step has a different prompt. Its answer is a sentence, a tool call and the next action.
    About three quarters of an answer's tokens are the same in all steps.
    """
    steps = []
    for number, (path, name, need) in enumerate(zip(_PATHS, _FUNCTIONS, _NEEDS, strict=True)):
        prompt = f"Issue {4100 + 17 * number}: {need} The function is {name}, in {path}.\n"
        call = {"path": path, "first_line": 20 + 31 * number, "last_line": 60 + 43 * number}
        answer = (
            f"I need to see how `{name}` works before I change it, so I will read it first.\n"
            f"```json\n{json.dumps({'tool': 'read_file', 'arguments': call})}\n```\n"
            f"Next I will change `{name}`, add a test, and run the tests of {path}.\n"
        )
        steps.append(Text("step of an agent", _tokens(prompt), _tokens(answer)[:num_tokens]))
    return steps


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
_PATHS = (
    *("services/gateway/core/routing.py", "src/parser/lexer.ts", "lib/net/socket.c"),
    *("app/models/invoice.rb", "internal/store/wal.go", "tools/lint/rules.py"),
    *("web/cart/total.js", "core/src/vm/heap.rs"),
)
_FUNCTIONS = (
    *("choose_replica", "nextToken", "sock_drain", "amount_due", "appendEntry", "check_imports"),
    *("sumOfItems", "sweep_pages"),
)
_NEEDS = (
    "A replica that is full should not be chosen.",
    "Comments that are nested end too early.",
    "What was sent last is lost when the peer closes.",
    "Discounts of more than one kind are not added up.",
    "After a crash the last record is read twice.",
    "Relative imports are reported although they are allowed.",
    "Prices in other currencies are rounded twice.",
    "Memory is not returned after a large object was freed.",
)
