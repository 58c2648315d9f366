"""gRPC ignores unknown channel arguments. So each argument in the code is looked up in gRPC."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from services.common.rpc.channel import CHANNEL_OPTIONS
from services.common.rpc.server import SERVER_OPTIONS

ROOT = Path(__file__).parents[4]


def channel_arguments(source: str) -> Iterator[str]:
    """The channel arguments named in source code, in pairs like `("grpc.so_reuseport", 0)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            name = node.elts[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("grpc."):
                yield str(name.value)


def used_arguments() -> dict[str, str]:
    """Maps each channel argument that services or benchmarks use to a file that uses it."""
    return {
        name: str(path.relative_to(ROOT))
        for folder in ("services", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if '"grpc.' in (source := path.read_text())  # parsing every file takes seconds
        for name in channel_arguments(source)
    }


@pytest.fixture(scope="module")
def grpc_core() -> bytes:
    """gRPC's native library, which contains the name of each argument, followed by a zero byte."""
    return Path(cygrpc.__file__).read_bytes()


def test_grpc_knows_every_argument(grpc_core: bytes) -> None:
    used = used_arguments()
    assert {name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)} <= set(used)
    unknown = {name: path for name, path in used.items() if name.encode() + b"\0" not in grpc_core}
    assert not unknown


def test_the_name_of_the_c_constant_is_not_the_name_of_the_argument(grpc_core: bytes) -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in grpc_core
