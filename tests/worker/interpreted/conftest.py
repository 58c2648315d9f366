"""Runs xFormers' own kernels on the CPU with Triton's interpreter.

Triton selects its interpreter when it is first imported. Therefore these tests are collected only
in a separate process, which tests/worker/unit/test_xformers_kernels.py starts.
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
    """Reports an H200 as the CUDA device, which xFormers queries for heads of size 128."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        yield


@pytest.fixture(autouse=True, scope="session")
def _language_replaced_once() -> Iterator[None]:
    """Replaces the functions of triton.language once for the session. Otherwise the interpreter
    would replace them at every launch and every call, which takes most of its time.
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
    """Switches off the interpreter's checks of offsets for overflow, which take two fifths of the
    time. Compiled kernels have no such checks, and all offsets of these tests are small.
    """
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
