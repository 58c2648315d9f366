"""Builds tokenizer.json and tokenizer_config.json from the metadata of a GGUF file. Both files are
plain JSON. transformers can also convert GGUF vocabularies, but it needs torch and the package
gguf, which the gateway's image does not have. It also ignores the field tokenizer.ggml.pre, which
names the *splitting rule*: how a text is split into words before each word is encoded.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.model_source.errors import GgufError
from services.common.model_source.gguf_header import GgufHeader

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
"""Types of tokens in GGUF files."""
_PADDING = re.compile(r"\[PAD\d+\]")
"""Tokens that llama.cpp's converter adds if an embedding has more rows than the vocabulary."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,COUNT}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN, _LLAMA3 = _CL100K.replace("{1,COUNT}", ""), _CL100K.replace("COUNT", "3")
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jina-v2-code", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
}
"""Maps each splitting rule to its regular expressions, in the order of their application."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Splitting rules that first normalize texts to Unicode's composed form (NFC)."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Splitting rules with which a word that is in the vocabulary is one token, without merges."""
_WITH_BOS = _WHOLE_WORDS | {"smaug-bpe"}
"""Splitting rules that by default start each text with the BOS token. A file can disable it."""
_SPACE = "▁"


def gguf_tokenizer(file: Path, header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns both files' contents. `header` must have been read with arrays. Raises GgufError."""
    metadata = header.metadata
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise GgufError(
            file,
            f"tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are: give a directory "
            "with config.json and the tokenizer's files beside the GGUF file",
        )
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    used = {
        token: token_id
        for token_id, (token, of) in enumerate(zip(tokens, kinds, strict=True))
        if of != _UNUSED or _PADDING.fullmatch(token) is None
    }
    parts = _bpe(file, metadata, used) if kind == "gpt2" else _sentencepiece(metadata, used, kinds)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": token_id, "content": token, **flags, "special": kinds[token_id] == _CONTROL}
        for token, token_id in used.items()
        if kinds[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", parts.pop("adds_bos"))
    special = _special_tokens(metadata, tokens)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _post_processor(metadata, special, adds_bos),
        **parts,
    }
    return tokenizer, _tokenizer_config(metadata, special)


def _bpe(file: Path, metadata: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre") or _guessed_rule(metadata, tokens)
    merges = metadata.get("tokenizer.ggml.merges")
    if pre not in _SPLITS or not isinstance(merges, list):
        problem = "tokenizer.ggml.merges is missing"
        if pre not in _SPLITS:
            problem = f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(_SPLITS)} are"
        raise GgufError(
            file, f"{problem}: give a directory with config.json and the tokenizer's files"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in _SPLITS[pre]
    ]
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            **_MODEL,
            "ignore_merges": pre in _WHOLE_WORDS,
            "vocab": tokens,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
        "adds_bos": pre in _WITH_BOS,
    }


def _guessed_rule(metadata: Mapping[str, Any], tokens: Mapping[str, int]) -> str:
    """Guesses the splitting rule of an old file without tokenizer.ggml.pre."""
    if metadata.get("general.architecture") in ("qwen2", "qwen3"):
        return "qwen2"
    return "llama-bpe" if "<|begin_of_text|>" in tokens else "gpt-2"


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Mapping[str, int], kinds: list[int]
) -> dict[str, Any]:
    """Builds a SentencePiece BPE tokenizer with byte fallback, like Llama 2's and Mistral's."""
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(kinds)
    normal = {
        token: scores[token_id] for token, token_id in tokens.items() if kinds[token_id] == _NORMAL
    }
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            **_MODEL,
            "unk_token": next((t for t, token_id in tokens.items() if token_id == unknown), None),
            "fuse_unk": True,
            "byte_fallback": _BYTE in kinds,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": _merges(normal),
        },
        "adds_bos": True,
    }


def _merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Returns all merges of two tokens into one, ordered by the score of the merged token."""
    found = [
        (-score, rank, token[:cut], token[cut:])
        for rank, (token, score) in enumerate(scores.items())
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [[left, right] for _, _, left, right in sorted(found)]


_MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """Maps names of special tokens in tokenizer_config.json to the tokens' texts."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {ours: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, ours in keys.items()}
    return {
        f"{name}_token": tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(tokens)
    }


def _post_processor(
    metadata: Mapping[str, Any], special: Mapping[str, str], adds_bos: bool
) -> dict[str, Any] | None:
    """Builds a post-processor that adds the BOS and EOS tokens that the file enables, if any."""
    adds = {"bos": adds_bos, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    ids = {
        special[f"{name}_token"]: metadata[f"tokenizer.ggml.{name}_token_id"]
        for name, is_added in adds.items()
        if is_added and f"{name}_token" in special
    }
    if not ids:
        return None

    def text(sequence: str, type_id: int) -> list[dict[str, Any]]:
        begin = special.get("bos_token") if adds["bos"] else None
        end = special.get("eos_token") if adds["eos"] else None
        return [
            {"SpecialToken": {"id": token, "type_id": type_id}}
            if token is not None
            else {"Sequence": {"id": sequence, "type_id": type_id}}
            for token in (*([begin] if begin else []), None, *([end] if end else []))
        ]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]}
            for token, token_id in ids.items()
        },
    }


def _tokenizer_config(metadata: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, Any]:
    template = metadata.get("tokenizer.chat_template")
    named = {
        name: metadata[f"tokenizer.chat_template.{name}"]
        for name in metadata.get("tokenizer.chat_templates") or ()
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if named and template is not None:
        named["default"] = template
    templates = [{"name": name, "template": text} for name, text in named.items()]
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **special,
        **({} if template is None and not templates else {"chat_template": templates or template}),
    }
