"""The model card of `models/demo`, with the numbers of the training run."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from tools.demo_model.training import Measure, Outcome, Plan

CODE_PROMPT = "def fibonacci(n):\n"
CHAT_PROMPT = "What does os.path.join do?"
SAMPLE_TOKENS = 120

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [python, llama, tiny]
---

# Stepwell's demo model

A Llama of {parameters:,} parameters that has read Python's standard library and nothing else. It
exists so that Stepwell can be tried, tested and shown on any machine, with no download and no
accelerator: its weights take eleven megabytes, and what it writes looks like Python. It is no
assistant, and nothing it says should be relied on.

| | |
|---|---|
| Architecture | `LlamaForCausalLM`, {layers} layers, hidden size {hidden}, MLP {intermediate} |
| Attention | {heads} query heads over {kv_heads} key-value heads of {head_dim}, RoPE |
| Vocabulary | {vocabulary}, byte-level BPE trained on the same text, embeddings tied |
| Context | {context} tokens |
| Weights | bfloat16, safetensors |

A document ends with `<|endoftext|>`, a turn of a chat with `<|im_end|>`. The chat template writes
`<|im_start|>`, the role (`system`, `user` or `assistant`), a line break, the content, `<|im_end|>`.

## How it was made

    python -m tools.train_demo_model --out models/demo --minutes {minutes:g} --seed {seed}

on two processor cores: {tokens:.1f} million tokens in {steps:,} steps and {minutes:g} minutes,
{epochs:.1f} times through the corpus. Muon for the matrices, AdamW for the rest, learning rate
{learning_rate:g} falling to zero along a cosine over the time of the run; rows of {short} and of
{long} tokens. The schedule follows the clock, so what a
run comes to depends on the machine and on what else it is doing.

The corpus is the standard library of Python {python}, {corpus_tokens:.1f} million tokens of it:

| Text | Tokens |
|---|---|
{corpus}

Interfaces are names, signatures and docstrings; the language reference is what `help()` prints;
conversations are made from the same docstrings and functions by a few patterns of question. Tests,
IDLE, installed packages, generated tables, file headers, lines of credit and e-mail addresses were
left out.

## How good it is

On {held_out_files} files of the library that it never saw, nor anything derived from them
({held_out_tokens:,} tokens): a loss of **{loss:.3f}** nats a token, **{bits:.3f} bits a byte**. On
what it was trained on the last loss was {training_loss:.3f}.

Two greedy samples from these weights, {sample_tokens} tokens at most:

{samples}

## Limits

It has seen few programs, for a short time: it mixes up the docstrings and functions of the
standard library, or repeats them word for word, and greedy decoding falls into loops. It does not
reason, follows no instruction but "what does X do" and "write a function that", knows no other
language or library, and its code mostly does not run. Names of people that stand in the text of
the library may turn up in its output.

## Licences

The text: Python's standard library, under the PSF licence (PSF-2.0) and, for parts of it, the
licences that are incorporated in it and compatible with it. The weights and the tokenizer:
Apache-2.0, as the rest of Stepwell.
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of the card. `model` is loaded from the exported folder."""

    model: PreTrainedModel
    plan: Plan
    outcome: Outcome
    quality: Measure
    corpus_tokens: dict[str, int]
    held_out_files: int


def write_card(folder: Path, facts: Facts) -> None:
    """Writes `README.md` into `folder`, with samples of the model in `folder`."""
    config = facts.model.config
    card = CARD.format(
        parameters=facts.model.num_parameters(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        minutes=facts.plan.minutes,
        seed=facts.plan.seed,
        learning_rate=facts.plan.learning_rate,
        short=min(facts.plan.row_lengths),
        long=max(facts.plan.row_lengths),
        tokens=facts.outcome.tokens / 1e6,
        steps=facts.outcome.steps,
        epochs=facts.outcome.epochs,
        training_loss=facts.outcome.training_loss,
        python=platform.python_version(),
        corpus_tokens=sum(facts.corpus_tokens.values()) / 1e6,
        corpus="\n".join(f"| {kind} | {count:,} |" for kind, count in facts.corpus_tokens.items()),
        held_out_files=facts.held_out_files,
        held_out_tokens=facts.quality.tokens,
        loss=facts.quality.loss,
        bits=facts.quality.bits_per_byte,
        sample_tokens=SAMPLE_TOKENS,
        samples=_samples(folder, facts.model),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _samples(folder: Path, model: PreTrainedModel) -> str:
    """A completion and a chat answer of the model, each as an indented block."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT_PROMPT}], tokenize=False, add_generation_prompt=True
    )
    texts = []
    for prompt in (CODE_PROMPT, chat):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=SAMPLE_TOKENS,
                do_sample=False,
                use_cache=True,
            )
        texts.append(tokenizer.decode(output[0]))
    return "\n\nand\n\n".join(
        "\n".join(f"    {line}".rstrip() for line in text.splitlines()) for text in texts
    )
