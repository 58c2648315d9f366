"""xFormers' kernels compiled for GPUs that are not there, from the calls that the worker makes.

Triton's compiler needs no device, but its front end asks for one. These tests stand in for it, and
so are collected only in a process of their own: see tests/worker/unit/test_xformers_kernels.py.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """What Triton says of xFormers' kernels is no fault here."""
    config.addinivalue_line("filterwarnings", "ignore:::triton")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
