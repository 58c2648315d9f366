"""Compiles the Triton kernels that a worker uses, for GPUs that this machine does not have.

Triton's compiler needs no GPU, but its front end queries a GPU, which these tests simulate.
Therefore they are collected only in a separate process, which
tests/worker/unit/test_xformers_kernels.py starts.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Ignores Triton's warnings about xFormers' kernels."""
    config.addinivalue_line("filterwarnings", "ignore:::triton")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
