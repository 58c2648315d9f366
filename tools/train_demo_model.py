"""Trains the demo model from the standard library and writes it in Hugging Face's format.

    nice -n 19 python -m tools.train_demo_model --out models/demo --minutes 60 --seed 0

Training needs no network and no accelerator. The model in the repository was trained in less than
an hour on two cores. `--checkpoints` names a directory to which the model is written every five
minutes.

Environment variables can halve the time on a machine that has other work. With
`OMP_WAIT_POLICY=passive`, a thread that waits for another thread does not occupy its core. With
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592`, the memory of freed tensors stays in the
process and is used again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tools.demo_model.card import Facts, write_card
from tools.demo_model.chat import chat_documents
from tools.demo_model.corpus import (
    Document,
    language_reference,
    read_sources,
    split_sources,
    standard_library,
)
from tools.demo_model.export import export
from tools.demo_model.interfaces import all_interfaces, interface_documents
from tools.demo_model.tokenizer import encode, train_tokenizer
from tools.demo_model.training import PEAK_LEARNING_RATE, Plan, Rows, build_model, measure, train

HELD_OUT_SHARE = 0.03
VOCABULARY = 4096
CONTEXT = 1024
LARGEST_FOLDER_BYTES = 12_000_000


def model_config() -> LlamaConfig:
    """A configuration with five and a half million parameters, which take less than twelve
    megabytes in bfloat16. Two query heads share a key-value head, so that grouped attention is
    exercised.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="eager",  # compiled, 1.5 times as fast on a CPU as fused attention
    )


def corpus(seed: int) -> tuple[dict[str, list[Document]], list[Document]]:
    """The training documents of each kind, and the held-out files."""
    split = split_sources(read_sources(standard_library()), seed, HELD_OUT_SHARE)
    interfaces = all_interfaces(split.modules_held_out())
    reference = language_reference()
    training = {
        "source": list(split.training),
        "interfaces": interface_documents(interfaces),
        "language reference": reference,
        "conversations": chat_documents(interfaces, split.training, reference, seed),
    }
    return training, list(split.held_out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=60, help="training time (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--learning-rate", type=float, default=PEAK_LEARNING_RATE)
    parser.add_argument("--checkpoints", type=Path, help="folder for the model as it is so far")
    parser.add_argument(
        "--no-compile", action="store_true", help="do without torch.compile and its C++ compiler"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    started = time.monotonic()

    # 1. The training text, and its tokens.
    kinds, held_out = corpus(options.seed)
    documents = [document for kind in kinds.values() for document in kind]
    tokenizer = train_tokenizer(documents, VOCABULARY)
    tokens_of = {kind: encode(tokenizer, texts) for kind, texts in kinds.items()}
    sizes = {kind: sum(map(len, encoded)) for kind, encoded in tokens_of.items()}
    held_out_ids = encode(tokenizer, held_out)
    held_out_bytes = sum(len(document.text.encode()) for document in held_out)
    print(f"corpus: {sizes} tokens, ready after {time.monotonic() - started:.0f} s", flush=True)

    # 2. Training.
    plan = Plan(
        minutes=options.minutes,
        seed=options.seed,
        learning_rate=options.learning_rate,
        compiled=not options.no_compile,
    )
    model = build_model(model_config(), options.seed)
    rows = Rows([ids for encoded in tokens_of.values() for ids in encoded], options.seed)

    def checkpoint() -> None:
        now = measure(model, held_out_ids, held_out_bytes, CONTEXT)
        print(f"held out: loss {now.loss:.3f}, {now.bits_per_byte:.3f} bits/byte", flush=True)
        if options.checkpoints:
            export(model, tokenizer, options.checkpoints)

    outcome = train(model, rows, plan, sum(sizes.values()), checkpoint)

    # 3. Export, and evaluation of the exported model.
    export(model, tokenizer, options.out)
    loaded = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.bfloat16)
    quality = measure(loaded, held_out_ids, held_out_bytes, CONTEXT)
    write_card(options.out, Facts(loaded, plan, outcome, quality, sizes, len(held_out)))
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(
        f"{options.out}: {size} bytes, held-out loss {quality.loss:.3f}, "
        f"{quality.bits_per_byte:.3f} bits/byte"
    )
    if size > LARGEST_FOLDER_BYTES:
        raise SystemExit(f"{options.out} is larger than {LARGEST_FOLDER_BYTES} bytes")


if __name__ == "__main__":
    main()
