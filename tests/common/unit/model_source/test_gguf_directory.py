"""A single GGUF file is a complete model, because its metadata has the configuration, the tokenizer
and the chat template.
"""

import heapq
import json
import os
import random
import stat
import struct
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.common.model_source.errors import ModelSourceError
from services.common.model_source.find import find_model, model_name
from services.worker.models.config import read_model_config
from services.worker.models.suitability.check import check_model
from tests.gguf_files import save_alone
from tests.tiny_models import save_tiny_model

TEXTS = [
    "Hello, world! It's 2026, isn't it?  Two  spaces\n\n\nand\r\nlines\t.",
    "def f(x):\n    return x ** 2  # 12345 €\n",
    "naïve café, cafe\u0301, Ünïcödé 日本語 한국어 🙂🙂 \u00a0x",
    "<|im_start|>user\nhi<|im_end|> <tool>x</tool>",
    "WE'LL I'M  'S 's",
    "",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
# Regular expressions of the published tokenizers of these models.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def by(expression: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, SPLIT])


RULES: dict[str, tuple[pre_tokenizers.PreTokenizer, Any]] = {
    "gpt-2": (PLAIN, None),
    "qwen2": (by(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
    "llama-bpe": (by(LLAMA3), None),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), PLAIN]),
        None,
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save_tokenizer(directory: Path, rule: str = "qwen2") -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer of 310 tokens on the texts of this file, and saves it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = RULES[rule]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens(["<tool>"])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return whole


@pytest.mark.parametrize("rule", RULES)
def test_a_byte_level_tokenizer_gives_the_same_tokens(tmp_path: Path, rule: str) -> None:
    architecture = "qwen2" if rule == "qwen2" else "llama"
    save_tiny_model(tmp_path / "model", architecture)
    expected = save_tokenizer(tmp_path / "model", rule)
    file = tmp_path / "Own-Q8.gguf"
    no_bos = {"tokenizer__ggml__add_bos_token": False}
    save_alone(tmp_path / "model", file, architecture, pre=rule, **no_bos)
    directory = find_model(str(file))
    assert model_name(directory) == "Own-Q8"
    found = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert found(text)["input_ids"] == expected(text)["input_ids"], text
        ids = expected(text)["input_ids"]
        assert found.decode(ids) == expected.decode(ids)
    assert (found.bos_token_id, found.eos_token_id) == (0, 2)
    assert found.all_special_ids == expected.all_special_ids
    assert len(found) == len(expected)
    chat = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(chat) == expected.apply_chat_template(chat)


def test_the_beginning_is_added_where_the_file_or_its_rule_says_so(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2")
    save_tokenizer(tmp_path / "model")
    for name, pre, metadata, begins in (
        ("asked", "qwen2", {"tokenizer__ggml__add_bos_token": True}, True),
        ("rule", "llama-bpe", {}, True),
        ("no", "qwen2", {}, False),
    ):
        file = tmp_path / f"{name}.gguf"
        save_alone(tmp_path / "model", file, "qwen2", pre=pre, **metadata)
        found = AutoTokenizer.from_pretrained(find_model(str(file)))
        assert (found("hi")["input_ids"][0] == 0) is begins
        assert found("hi", add_special_tokens=False)["input_ids"][0] != 0


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "llama_tied", "llama_wide_heads", "llama_linear", "llama_yarn", "llama_llama3"),
        *("qwen2", "qwen3"),
    ],
)
def test_the_configuration_is_that_of_the_directory(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    save_tiny_model(model, kind, eos_token_id=2, bos_token_id=0)
    save_tokenizer(model)
    save_alone(model, tmp_path / "alone.gguf", kind.partition("_")[0])
    directory = find_model(str(tmp_path / "alone.gguf"))
    check_model(directory)
    (directory / "generation_config.json").unlink()
    (model / "generation_config.json").unlink()
    assert read_model_config(directory) == read_model_config(model)


@pytest.mark.parametrize("key", ["scale_linear", "scaling.factor"])
def test_a_factor_without_a_type_is_of_linear_scaling(tmp_path: Path, key: str) -> None:
    """As in llama.cpp. Files of 2023, such as vicuna-7b-v1.5-16k, have no type."""
    plain, model = tmp_path / "plain", tmp_path / "model"
    save_tiny_model(plain, "llama")
    save_tiny_model(model, "llama_linear")
    save_tokenizer(plain)
    save_alone(plain, tmp_path / "old.gguf", "llama", **{f"llama.rope.{key}": 4.0})
    directory = find_model(str(tmp_path / "old.gguf"))
    assert read_model_config(directory).rope == read_model_config(model).rope


def test_a_directory_with_nothing_but_a_file_is_that_file(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "only").mkdir()
    save_alone(tmp_path / "model", tmp_path / "only" / "x.gguf", "qwen2")
    directory = find_model(str(tmp_path / "only"))
    assert directory == find_model(str(tmp_path / "only" / "x.gguf"))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", "qwen2")
    save_tokenizer(tmp_path / "model")
    save_alone(tmp_path / "model", tmp_path / "small.gguf", "qwen2")
    return tmp_path / "small.gguf"


def test_a_link_with_another_name_is_a_model_of_that_name(small_file: Path) -> None:
    link = small_file.with_name("other.gguf")
    link.symlink_to(small_file)
    for file in (small_file, link, small_file):
        directory = find_model(str(file))
        assert model_name(directory) == file.stem
        check_model(directory)


def test_without_a_usable_cache_a_directory_of_this_user_is_used(
    small_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors such as ELOOP and EROFS (a read-only container) have no class of their own."""
    loop, temporary = tmp_path / "loop", tmp_path / "temporary"
    loop.symlink_to(loop)
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(loop))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    directory = find_model(str(small_file))
    own = temporary / f"stepwell-gguf-{os.geteuid()}"
    assert own in directory.parents
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    check_model(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_directory_that_another_user_made_is_not_used(
    small_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    foreign = tmp_path / f"stepwell-gguf-{os.geteuid()}"
    foreign.mkdir()
    os.chown(foreign, 10_001, 10_001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "loop"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ModelSourceError, match="Too many levels of symbolic"):
        find_model(str(small_file))
    assert not list(foreign.iterdir())


def _with_value(key: bytes, value: bytes) -> bytes:
    """A file without tensors and with one value, which begins with the number of its type."""
    return struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + value


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("x.gguf", lambda content: content[:60], "the header is not that of a GGUF file"),
        ("x.gguf", lambda content: b"GGML" + content[4:], "not that of a GGUF file of version"),
        (
            "x.gguf",
            lambda content: content.replace(b"qwen2", b"mamba"),
            "tokenizer.ggml.pre 'mamba' is not supported",
        ),
        (
            "x.gguf",
            lambda content: content.replace(b"qwen2", b"mamba", 1),
            "architecture 'mamba' is not supported; llama, qwen2, qwen3 are",
        ),
        (
            "x.gguf",
            lambda content: content.replace(b"gpt2", b"t5  "),
            "tokenizer.ggml.model 't5  '",
        ),
        (
            "x.gguf",
            lambda _: _with_value(b"a", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
            "the header is not that of a GGUF file",
        ),
        (
            "x.gguf",
            lambda _: _with_value(b"general.alignment", struct.pack("<II", 4, 0)),
            "general.alignment is 0, not a number above 0",
        ),
        (
            "x-00002-of-00003.gguf",
            lambda content: content,
            "the file is one of several parts of a model",
        ),
        (
            "x.gguf",
            lambda content: content.replace(b"block_count", b"block_xxxxx"),
            "qwen2.block_count must be a number above 0",
        ),
        (
            "x.gguf",
            lambda content: content.replace(b"head_count_kv", b"head_count_xx"),
            "tensor blk.0.attn_k.weight has ",
        ),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, name: str, change: Any, problem: str) -> None:
    save_tiny_model(tmp_path / "model", "qwen2")
    save_tokenizer(tmp_path / "model")
    file = tmp_path / name
    save_alone(tmp_path / "model", file, "qwen2")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelSourceError) as caught:
        find_model(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert problem in str(caught.value)


def sentencepiece(tokens: dict[str, tuple[int, float]], text: str) -> list[int]:
    """Encodes a text by SentencePiece's BPE: repeatedly merges the neighbours whose merged token
    has the best score, and of equally good ones the leftmost. Characters without a token are
    encoded as bytes.
    """
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best = [
            (-tokens[left + right][1], place)
            for place, (left, right) in enumerate(pairwise(pieces))
            if left + right in tokens
        ]
        if not best:
            break
        place = heapq.nsmallest(1, best)[0][1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in (
            [tokens[piece][0]]
            if piece in tokens
            else [tokens[f"<0x{byte:02X}>"][0] for byte in piece.encode()]
        )
    ]


def test_a_vocabulary_of_sentencepiece_gives_the_same_tokens(tmp_path: Path) -> None:
    draw = random.Random(1)
    letters = "▁abcde"
    made = {"".join(draw.choices(letters, k=draw.randint(2, 4))) for _ in range(40)}
    words = sorted({word[:end] for word in made for end in range(2, len(word) + 1)})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))]
    writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", gguf.np.zeros((len(names), 32), gguf.np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = AutoTokenizer.from_pretrained(find_model(str(tmp_path / "spm.gguf")))
    tokens = {
        name: (token_id, scores[token_id])
        for token_id, name in enumerate(names)
        if kinds[token_id] in (1, 6)
    }
    for _ in range(200):
        text = "".join(draw.choices("abcde  ñ\n🙂", k=draw.randint(1, 8)))
        ids = found(text)["input_ids"]
        assert ids == [1, *sentencepiece(tokens, text)], text
        assert found.decode(ids[1:]) == text
    assert 2 in found("a</s>b")["input_ids"]
