"""Reads Dockerfiles as lists of instructions by stage."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "deploy" / "docker" / "Dockerfile"
WORKER = ROOT / "deploy" / "docker" / "worker.Dockerfile"
TARGETS = {
    "gateway": (SERVICES, "gateway"),
    "scheduler": (SERVICES, "scheduler"),
    "kvpool": (SERVICES, "kvpool"),
    "worker": (WORKER, "cpu"),
    "worker-cuda": (WORKER, "cuda"),
}
"""Maps each image to its Dockerfile and stage."""


@dataclass
class Stage:
    """A stage: its base image or stage, and its instructions (word and text) in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [text for found, text in self.instructions if found == word]


def stages_of(path: Path) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    stages: dict[str, Stage] = {}
    current = Stage("")
    for line in joined.splitlines():
        word, _, text = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = text.partition(" AS ")
            current = stages[name] = Stage(base)
        elif word:
            current.instructions.append((word, " ".join(text.split())))
    return stages


def instructions_of(image: str, word: str) -> list[str]:
    """The texts of all instructions `word` of an image. Instructions of base stages precede."""
    path, name = TARGETS[image]
    stages = stages_of(path)
    found: list[str] = []
    while name in stages:
        found = [*stages[name].all(word), *found]
        name = stages[name].base
    return found


def environment_of(image: str) -> dict[str, str]:
    """The environment variables that an image sets."""
    pairs = (pair for text in instructions_of(image, "ENV") for pair in text.split())
    return dict(pair.split("=", 1) for pair in pairs)


def packages_in(image: str) -> list[str]:
    """The arguments of `packages.py install` for the image."""
    path, name = TARGETS[image]
    stages = stages_of(path)
    sources = [text.split()[0] for text in stages[name].all("COPY")]
    names: list[str] = []
    for source in sources:
        for run in stages[source.removeprefix("--from=")].all("RUN"):
            if (
                match := re.search(r"packages\.py install /site ([\w ]+?)\s*(&&|$)", run)
            ) is not None:
                names += match[1].split()
    return names
