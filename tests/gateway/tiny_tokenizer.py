"""Small tokenizers with chat templates, which tests generate."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
SPECIAL = (END, "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + m.role) }}"
    "{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(
    directory: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    special: Sequence[str] = SPECIAL,
    texts: Sequence[str] = ("the stop string, the hello world of them",),
    size: int = 320,
) -> Path:
    """Writes a byte-level BPE tokenizer of up to `size` tokens for `texts`. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts] * 4, trainer)
    return _write(directory, tokenizer, chat_template)


def write_marked_tokenizer(directory: Path) -> Path:
    """Writes a tokenizer in SentencePiece's style: "▁" stands for a space, and characters without a
    token are encoded as byte tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pieces = [END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "he"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _write(directory, tokenizer, None)


def _write(directory: Path, tokenizer: Tokenizer, chat_template: str | None) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
