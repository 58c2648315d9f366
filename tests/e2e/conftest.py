"""Stacks that several tests share: each kind starts when it is first wanted, and all end with the
last test of this package.

A stack that serves nothing takes a hundredth of a processor. So the files whose tests share stacks
come after all others, those that share the same ones one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.stack import ROOT, Stack
from tests.e2e.tiny import save_servable_model

# A cache that is soon all written to, so that memory can be seen to stay; a pool that holds about
# four of the sequences that the tests run sixteen of; steps that cut prompts into chunks of seven,
# in the order of priorities.
FLAGS = {
    "plain": ("--num-blocks", "1000"),
    "small pool": ("--num-blocks", "24", "--max-model-len", "256"),
    "chunks of 7": (
        *("--max-num-batched-tokens", "7", "--max-num-seqs", "7"),
        *("--policy", "priority"),
    ),
    "speculating": (
        *("--num-blocks", "1000", "--speculative-config"),
        '{"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}',
    ),
    "vllm.grpc": ("--num-blocks", "1000", "--vllm-grpc-port", "0"),
}
DEMO = ROOT / "models" / "demo"
# All that clients of other projects ask for: tool calls, and vllm.grpc.engine.
DEMO_FLAGS = (
    *("--num-blocks", "2000", "--max-num-seqs", "16"),
    *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
    *("--vllm-grpc-port", "0", "--vllm-grpc-client-stops"),
)


SHARED_FIXTURES = ("stack_of", "demo_stack", "demo_replicas")
"""Those below that start stacks, in the order in which files come that use them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts this package's tests by file; other tests keep their places."""
    places = [
        place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents
    ]
    own = [items[place] for place in places]
    ranks: dict[Path, int] = {}
    for item in own:
        ranks[item.path] = max(ranks.get(item.path, 0), shared_rank(item))
    own.sort(key=lambda item: ranks[item.path])
    for place, item in zip(places, own, strict=True):
        items[place] = item


def shared_rank(item: pytest.Item) -> int:
    """0 for a test that shares no stack, else the place of the last fixture by which it does."""
    names = getattr(item, "fixturenames", ())
    return max((rank for rank, name in enumerate(SHARED_FIXTURES, 1) if name in names), default=0)


@dataclass(frozen=True)
class TinyModel:
    """A model on disk and in memory."""

    directory: Path
    model: PreTrainedModel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model that the stacks serve."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return TinyModel(directory, save_servable_model(directory))


@pytest.fixture(scope="package")
def stack_of(tiny_model: TinyModel) -> Iterator[Callable[[str], Stack]]:
    """The running stack of a kind."""
    running: dict[str, Stack] = {}

    def stack_of(kind: str) -> Stack:
        if kind not in running:
            running[kind] = Stack(tiny_model.directory, *FLAGS[kind])
        return running[kind]

    yield stack_of
    for stack in running.values():
        stack.terminate()
    for stack in running.values():
        stack.close()


@pytest.fixture(scope="package")
def stack(stack_of: Callable[[str], Stack]) -> Stack:
    """The plain stack."""
    return stack_of("plain")


@pytest.fixture(scope="package")
def vllm_stack(stack_of: Callable[[str], Stack]) -> Stack:
    """A stack whose scheduler serves vllm.grpc.engine, too."""
    return stack_of("vllm.grpc")


@pytest.fixture(scope="package")
def demo_stack() -> Iterator[Stack]:
    """A stack that serves the demo model, whose text is text."""
    with closing(Stack(DEMO, *DEMO_FLAGS)) as stack:
        yield stack


@pytest.fixture(scope="package")
def demo_replicas() -> Iterator[Stack]:
    """The same with two replicas."""
    with closing(Stack(DEMO, *DEMO_FLAGS, "--replicas", "2")) as stack:
        yield stack
