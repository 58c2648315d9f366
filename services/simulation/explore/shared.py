"""Objects that all runs in a process share, because they never change."""

import atexit
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from services.common.errors import InvalidArgument
from services.common.request import grammar_compiler
from services.common.request.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, adapter_digest
from services.common.request.grammar_compiler import GrammarCompiler
from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.adapters.grammars import compiler_process
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.simulation.explore.requests import ADAPTERS

if TYPE_CHECKING:
    from llguidance import LLMatcher


@cache
def tokenizer(model: Path) -> HfTokenizer:
    return load_tokenizer(model)


@cache
def adapters(model: Path) -> dict[Adapter, Path]:
    """Returns small LoRA adapters and their directories. The paths in the Adapter objects, which
    messages contain, are the same in every run.
    """
    config = json.loads((model / "config.json").read_text())
    width = config["num_attention_heads"] * config["head_dim"]
    found, root = {}, Path(mkdtemp(prefix="stepwell-adapters-"))
    atexit.register(rmtree, root, ignore_errors=True)
    for number, name in enumerate(ADAPTERS):
        directory = root / name
        directory.mkdir()
        peft = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
        (directory / CONFIG_FILE).write_text(json.dumps(peft))
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{module}.lora_A.weight": np.ones((1, config["hidden_size"]), np.float32),
            f"{module}.lora_B.weight": np.full((width, 1), number + 1, np.float32),
        }
        save_file(tensors, directory / WEIGHTS_FILE)
        found[Adapter(adapter_digest(directory), name, f"/adapters/{name}")] = directory
    return found


class SharedCompiler(GrammarCompiler):
    """Compiles each grammar only once."""

    def compile(self, wanted: StructuredOutputs) -> "LLMatcher":
        return _compiled(self, wanted).deep_copy()


@cache
def _compiled(compiler: SharedCompiler, wanted: StructuredOutputs) -> "LLMatcher":
    return GrammarCompiler.compile(compiler, wanted)


@cache
def _compiler(tokenizer_json: str, vocab_size: int, ends: tuple[int, ...]) -> SharedCompiler:
    return SharedCompiler(tokenizer_json, vocab_size, ends)


def _shared_compiler(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> SharedCompiler:
    return _compiler(tokenizer_json, vocab_size, tuple(eos_token_ids))


grammar_compiler.GrammarCompiler = _shared_compiler  # type: ignore[misc, assignment]


class CompilerInProcess:
    """Takes the place of the gateway's CompilerProcess. Compiles in this process, in no time."""

    has_ended = False

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._compiler = _shared_compiler(tokenizer_json, vocab_size, eos_token_ids)

    def judge(self, wanted: StructuredOutputs) -> tuple[str, float]:
        try:
            self._compiler.compile(wanted)
        except InvalidArgument as error:
            return error.message, 0.0
        return "", 0.0


compiler_process.CompilerProcess = CompilerInProcess  # type: ignore[misc, assignment]
