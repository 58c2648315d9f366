"""llama.cpp, in bfloat16, 8 or 4 bits, under the loads of benchmarks.worker.loads.

`benchmarks.worker` starts this program in a separate interpreter that has gguf and
llama-cpp-python, built for this machine (`CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON"`).
Requests are sequences of one batch, as in llama.cpp's own server. The common prefix of all prompts
is computed once and shared by every sequence.
"""

import ctypes
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from benchmarks.worker.llama_weights import (
    Array,
    llama_name,
    llama_order,
    read_bfloat16,
    to_float32,
)
from benchmarks.worker.loads import (
    DECODE_PROMPT,
    MAX_REQUESTS,
    MAX_TOKENS,
    Prompts,
    Times,
    parse_arguments,
    serve,
)

MAX_BATCH_TOKENS = MAX_REQUESTS * DECODE_PROMPT
FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
IN_8_BITS_AT_LEAST = ("token_embd.weight", "output.weight")
_ERROR_LEVEL = 4


class Context:
    """A llama.cpp context with a KV cache for the largest load. Contexts can share a model."""

    def __init__(self, model: object, vocab_size: int, threads: int, *, unified: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = MAX_TOKENS
        params.n_seq_max = MAX_REQUESTS
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        self._vocab_size = vocab_size
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int) -> Times:
        """Does the same as `loads.Generate`. The first `num_shared` tokens are computed once."""
        llama_cpp.llama_memory_clear(self._memory, False)
        if num_shared:
            self._forward([(0, 0, prompts[0][:num_shared])])
            for sequence in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        rests = [(seq, num_shared, prompt[num_shared:]) for seq, prompt in enumerate(prompts)]
        sampled = self._forward(rests)
        times = [[time.perf_counter()] for _ in sampled]
        for position in range(len(prompts[0]), len(prompts[0]) + num_tokens - 1):
            sampled = self._forward([(seq, position, [token]) for seq, token in enumerate(sampled)])
            now = time.perf_counter()
            for each in times:
                each.append(now)
        return times

    def _forward(self, pieces: list[tuple[int, int, list[int]]]) -> list[int]:
        """Computes `pieces`, each a tuple of a sequence, its first position and its tokens.

        Returns the token that is sampled after each piece.
        """
        batch, count = self._batch, 0
        for sequence, first, tokens in pieces:
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = first + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
        batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {count} tokens returned {status}")
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (len(pieces), self._vocab_size)
        )
        sampled: list[int] = logits.argmax(axis=1).tolist()
        return sampled


class LlamaCpp:
    """A model with two KV caches: a unified one, and one that is split by sequence. The split one
    is faster, but only in the unified one sequences can share a prefix.
    """

    def __init__(self, path: Path, vocab_size: int, threads: int) -> None:
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp loads no model from {path}")
        self._apart = Context(model, vocab_size, threads, unified=False)
        self._unified = Context(model, vocab_size, threads, unified=True)

    def generate(self, prompts: Prompts, num_tokens: int) -> Times:
        """Generates tokens as `loads.Generate` requires."""
        num_shared = _num_shared(prompts)
        context = self._unified if num_shared else self._apart
        return context.generate(prompts, num_tokens, num_shared)


def _num_shared(prompts: Prompts) -> int:
    """The number of common first tokens of several prompts. It is 0 for a single prompt."""
    if len(prompts) == 1:
        return 0
    columns = enumerate(zip(*prompts, strict=True))
    return next((index for index, tokens in columns if len(set(tokens)) > 1), 0)


def write_gguf(model: Path, weights: str) -> Path:
    """Writes the model's weights in llama.cpp's format, as one of FILE_TYPES, to the model's
    directory. An existing file that is newer than the weights is kept.
    """
    source = model / "model.safetensors"
    path = model.with_name(f"{model.name}.{weights}.gguf")
    if path.is_file() and path.stat().st_mtime >= source.stat().st_mtime:
        return path
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in read_bfloat16(source):
        _add_tensor(writer, llama_name(name), llama_order(name, tensor, config), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Array, weights: str) -> None:
    """Adds a tensor, which is given as bfloat16 bits. Vectors are stored exactly, in float32."""
    if tensor.ndim == 1:
        writer.add_tensor(name, to_float32(tensor))
    elif weights == "bf16":
        halves = np.ascontiguousarray(tensor).view(np.uint8)
        writer.add_tensor(name, halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        kind = gguf.GGMLQuantizationType["Q8_0" if name in IN_8_BITS_AT_LEAST else weights.upper()]
        writer.add_tensor(name, gguf.quantize(to_float32(tensor), kind), raw_dtype=kind)


def _log_errors(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Prints only the errors from llama.cpp's log, which is long."""
    if level == _ERROR_LEVEL:
        sys.stderr.write(text.decode())


_LOG_ERRORS = llama_cpp.llama_log_callback(_log_errors)
"""Prevents the garbage collection of the callback, to which llama.cpp has no Python reference."""


def main() -> None:
    arguments = parse_arguments(tuple(FILE_TYPES))
    llama_cpp.llama_log_set(_LOG_ERRORS, ctypes.c_void_p(0))
    engine = LlamaCpp(
        write_gguf(arguments.model, arguments.weights), arguments.vocab_size, arguments.threads
    )
    serve(engine.generate, arguments, f"llama.cpp {version('llama-cpp-python')}")


if __name__ == "__main__":
    main()
