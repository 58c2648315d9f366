"""Runs xFormers' own kernels on the CPU with Triton's interpreter.

Triton selects the interpreter at its first import. These tests are therefore collected only in a
separate process, which tests/worker/unit/test_xformers_kernels.py starts.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Ignores Triton's warnings about xFormers' kernels and about infinities in them."""
    config.addinivalue_line("filterwarnings", "ignore:::triton")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _hopper() -> Iterator[None]:
    """For heads of size 128 xFormers queries the CUDA device. This fixture reports an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        yield


@pytest.fixture(autouse=True, scope="session")
def _language_replaced_once() -> Iterator[None]:
    """Replaces the functions of triton.language once for the session. The interpreter itself
    replaces them, in each module that a kernel sees, at every launch and every call, which takes
    most of its time.
    """
    replace_functions = interpreter._patch_lang
    modules = (triton.language, triton.language.core)
    replaced: set[tuple[bool, ...]] = set()

    def replace_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        seen = {id(value) for value in function.__globals__.values()}
        which = tuple(id(module) in seen for module in modules)
        if which not in replaced:
            replaced.add(which)
            replace_functions(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _offsets_unchecked() -> Iterator[None]:
    """Switches off the interpreter's overflow checks of offsets, as in kernels compiled without
    debugging. The checks recompute sums and products in 64 bits, which takes two fifths of the
    time. All offsets of these tests are small.
    """
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
