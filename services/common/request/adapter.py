"""A LoRA adapter, which requests can name instead of the model."""

import errno
import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights of a model's projections. `digest` is the SHA-256 of the adapter's files, `name`
    is the name that clients use, and `path` is the adapter's directory.
    """

    digest: bytes
    name: str
    path: str


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_CHUNK_BYTES = 2**20


def adapter_digest(directory: Path) -> bytes:
    """SHA-256 over the names, sizes and contents of the adapter's files, 32 bytes. The digest does
    not depend on the directory. Raises OSError if a file is not a regular file or cannot be read.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = directory / name
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for another process
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        digest.update(f"{name} {status.st_size}\n".encode())
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.digest()
