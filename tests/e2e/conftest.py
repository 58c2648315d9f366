"""Stacks (running services) that several tests share. A stack starts when a test first uses it, and
ends after the last test of this package.

An idle stack takes a hundredth of a processor. Therefore files that share stacks run after all
other files, and files with the same stacks run one after another.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from tests.e2e.stack import ROOT, Stack
from tests.e2e.tiny import MAX_MODEL_LEN, save_servable_model, save_tokenizer
from tests.otlp_receiver import OtlpReceiver
from tests.pooling_models import save_embedder
from tests.tiny_models import edit_config

# The flags of each stack. The KV cache of "plain" is small and soon fully written, so that tests
# can observe constant memory. The one of "small pool" fits about four of the sixteen sequences that
# the tests run. The gateway of "chunks of 7" may hang for some seconds without being restarted.
FLAGS = {
    "plain": ("--num-blocks", "1000", "--vllm-grpc-port", "0"),
    "small pool": (
        *("--num-blocks", "24", "--max-model-len", "256", "--speculative-config"),
        '{"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}',
    ),
    "chunks of 7": (
        *("--max-num-batched-tokens", "7", "--max-num-seqs", "7"),
        *("--policy", "priority", "--liveness-timeout-seconds", "60"),
    ),
}
ENVIRON = {
    "chunks of 7": {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.3"},
}
"""Variables of a stack: spans are sent after 0.2 s, and again if the gateway hangs for 0.3 s."""
TEMPLATE = TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
)
"""Adds a special token at both ends of a text, as most embedding models require."""
DEMO = ROOT / "models" / "demo"
# Flags for features that clients of other projects need: tool calls and vllm.grpc.engine.
DEMO_FLAGS = (
    *("--num-blocks", "2000", "--max-num-seqs", "16"),
    *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
    *("--vllm-grpc-port", "0", "--vllm-grpc-client-stops"),
)


SHARED_FIXTURES = ("stack_of", "embedder", "demo_stack", "demo_replicas")
"""The fixtures that start shared stacks. Files run in the order of the stacks that they use."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts this package's tests by file. The order of other tests does not change."""
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
    """The position in SHARED_FIXTURES, counted from 1, of the last of these fixtures that a test
    uses. 0 if it uses none.
    """
    names = getattr(item, "fixturenames", ())
    return max((rank for rank, name in enumerate(SHARED_FIXTURES, 1) if name in names), default=0)


@dataclass(frozen=True)
class TinyModel:
    """A model in a directory, and the same model loaded by transformers."""

    directory: Path
    model: PreTrainedModel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return TinyModel(directory, save_servable_model(directory))


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with closing(OtlpReceiver()) as receiver:
        yield receiver


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A directory for sockets, whose paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="package")
def stack_of(tiny_model: TinyModel) -> Iterator[Callable[[str], Stack]]:
    """A function that starts the stack of a kind, or returns the stack if it already runs."""
    running: dict[str, Stack] = {}

    def stack_of(kind: str) -> Stack:
        if kind not in running:
            running[kind] = Stack(tiny_model.directory, *FLAGS[kind], environ=ENVIRON.get(kind))
        return running[kind]

    yield stack_of
    for stack in running.values():
        stack.terminate()
    for stack in running.values():
        stack.close()


@pytest.fixture(scope="package")
def stack(stack_of: Callable[[str], Stack]) -> Stack:
    """The plain stack. Its scheduler also serves vllm.grpc.engine."""
    return stack_of("plain")


@pytest.fixture(scope="package")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("models") / "embedder"
    model = save_embedder(directory, "qwen3", "last")
    edit_config(directory, max_position_embeddings=MAX_MODEL_LEN)
    save_tokenizer(directory, TEMPLATE)
    return TinyModel(directory, model)


@pytest.fixture(scope="package")
def embedder(embedding_model: TinyModel) -> Iterator[Stack]:
    """A stack that serves the embedding model. Its requests may have priorities."""
    flags = ("--policy", "priority", "--served-model-name", "tiny", "--num-blocks", "200")
    steps = ("--dtype", "float32", "--max-num-batched-tokens", "16")
    with closing(Stack(embedding_model.directory, *flags, *steps)) as stack:
        yield stack


@pytest.fixture(scope="package")
def demo_receiver() -> Iterator[OtlpReceiver]:
    with closing(OtlpReceiver()) as receiver:
        yield receiver


@pytest.fixture(scope="package")
def demo_stack(demo_receiver: OtlpReceiver) -> Iterator[Stack]:
    """A stack that samples no request at its start. All requests count as slow, and some slow
    requests are traced at their end.
    """
    traces = ("--otlp-endpoint", demo_receiver.endpoint, "--trace-sample-ratio", "0")
    slow = {"STEPWELL_GATEWAY_TRACE_SLOW_SECONDS": "0.0001"}
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "100", **slow}
    with closing(Stack(DEMO, *DEMO_FLAGS, *traces, environ=environ)) as stack:
        yield stack


@pytest.fixture(scope="package")
def demo_replicas() -> Iterator[Stack]:
    """Two replicas, each with a KV cache that fits about five of the tests' requests."""
    limits = ("--num-blocks", "64", "--max-model-len", "512", "--dtype", "float32")
    with closing(Stack(DEMO, *DEMO_FLAGS, *limits, "--replicas", "2")) as stack:
        yield stack
