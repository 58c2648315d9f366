"""The fingerprint of a model's tokenizer, which gateway and worker compare."""

from hashlib import sha256
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def has_tokenizer(directory: Path) -> bool:
    """Whether transformers can find a tokenizer in a directory."""
    names = ("tokenizer.json", "tokenizer_config.json")
    return any((directory / name).is_file() for name in names)


def tokenizer_fingerprint(directory: Path) -> bytes:
    """32 bytes that are equal for equal tokenizers, or no bytes without tokenizer files. If
    `tokenizer.json` exists, the bytes depend on this file alone, since it describes the whole
    tokenizer. Otherwise they depend on the files from which `tokenizer.json` would be built.
    """
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not present:
        return b""
    digest = sha256()
    for name in present[:1] if present[0] == "tokenizer.json" else present:
        digest.update(name.encode() + b"\0" + sha256((directory / name).read_bytes()).digest())
    return digest.digest()
