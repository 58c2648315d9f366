"""The demo model's tokenizer: byte-level BPE, whose decoding returns exactly the encoded text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.chat import CHAT_TEMPLATE
from tools.demo_model.corpus import Document

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# GPT-2's pattern, except that line breaks are pieces of their own. GPT-2 joins a line break with
# the indentation after it. If a prompt ended with a line break, the model would then never continue
# it with an indented line.
PIECES = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"
)


def train_tokenizer(documents: Iterable[Document], vocabulary: int) -> Tokenizer:
    """Learns `vocabulary` tokens: three special tokens (ids 0, 1, 2), 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The texts of special tokens are removed, so that their characters are not merged.
    marks = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    tokenizer.train_from_iterator((marks.sub("", doc.text) for doc in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[list[int]]:
    """The token ids of each document, with `<|endoftext|>` as the last token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return [[*encoding.ids, end] for encoding in encodings]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes the files that `AutoTokenizer` reads, including the chat template.

    A chat turn ends with `<|im_end|>`, and a document with `<|endoftext|>`. As in Qwen's models,
    `<|im_end|>` is the tokenizer's end of sequence, and `generation_config.json` names both tokens.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "bos_token": None,
            **named,
            "additional_special_tokens": [TURN_START, TURN_END],
            "added_tokens_decoder": added,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        folder / "special_tokens_map.json",
        {**named, "additional_special_tokens": [TURN_START, TURN_END]},
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON, with a line break at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
