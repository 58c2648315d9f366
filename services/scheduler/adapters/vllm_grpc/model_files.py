"""Information about a model for vllm.grpc.engine, from the files in the model's directory."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from services.common.errors import FailedPrecondition

_CHUNK_BYTES = 64 * 1024

_TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
"""Patterns of the files from which a client builds the tokenizer. Each model has some of them."""

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters in generation_config.json that clients use as defaults."""


class ModelFiles:
    """The directory of a model, if the scheduler's machine has it."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._config = self._read("config.json")
        self._generation_config = self._read("generation_config.json")

    def describe(self, response: vllm_engine_pb2.GetModelInfoResponse) -> None:
        """Sets the fields of a response that follow from the files."""
        if self._directory is not None:
            response.model_path = response.tokenizer_path = str(self._directory.resolve())
        response.model_type = self._config.get("model_type") or ""
        response.architectures.extend(self._config.get("architectures") or ())
        response.pad_token_id = self._config.get("pad_token_id") or 0
        response.bos_token_id = _first(self._config.get("bos_token_id"))
        defaults = {
            name: value
            for name in _SAMPLING_DEFAULTS
            if (value := self._generation_config.get(name)) is not None
        }
        if defaults:
            response.default_sampling_params_json = json.dumps(defaults)

    def tokenizer_chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yields the tokenizer's files as a ZIP archive, in chunks. The last chunk has the
        archive's SHA-256. Raises FailedPrecondition if there is no tokenizer file.
        """
        archive = self._archive()
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(
                data=archive[start:end], sha256=digest if end >= len(archive) else ""
            )

    def _archive(self) -> bytes:
        if self._directory is None:
            raise FailedPrecondition(
                "this scheduler has no directory of the model: start it with --model"
            )
        paths = {path for name in _TOKENIZER_PATTERNS for path in self._directory.glob(name)}
        if not paths:
            raise FailedPrecondition(
                "the directory of the scheduler's --model has no tokenizer files"
            )
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(paths):
                archive.write(path, path.name)
        return buffer.getvalue()

    def _read(self, name: str) -> dict[str, Any]:
        if self._directory is None or not (self._directory / name).is_file():
            return {}
        try:
            found = json.loads((self._directory / name).read_text())
        except ValueError as error:
            raise FailedPrecondition(f"{self._directory / name} is not JSON: {error}") from error
        return found if isinstance(found, dict) else {}


def _first(token_ids: int | list[int] | None) -> int:
    if isinstance(token_ids, list):
        return token_ids[0] if token_ids else 0
    return token_ids or 0
