"""A tokenizer's fingerprint depends on the files that determine the tokens of a text."""

from pathlib import Path

from services.common.request.tokenizer_files import tokenizer_fingerprint


def test_the_fingerprint_depends_on_the_files_that_decide_the_tokens(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == b""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("a b")
    slow = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a c")
    assert tokenizer_fingerprint(tmp_path) != slow
    (tmp_path / "tokenizer.json").write_text("{}")
    fast = tokenizer_fingerprint(tmp_path)
    assert len({b"", slow, fast}) == 3
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ""}')
    assert tokenizer_fingerprint(tmp_path) == fast
