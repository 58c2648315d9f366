"""xFormers' own kernels, run on the CPU by Triton's interpreter.

Triton decides at its first import whether it interprets. These tests are therefore collected only
in a process of their own, which tests/worker/unit/test_xformers_kernels.py starts.
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
    """What Triton says of xFormers' kernels, and of infinities in them, is no fault here."""
    config.addinivalue_line("filterwarnings", "ignore:::triton")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _hopper() -> Iterator[None]:
    """Heads of 128 make xFormers ask what CUDA device there is; here it hears of an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        yield


@pytest.fixture(autouse=True, scope="session")
def _language_replaced_once() -> Iterator[None]:
    """The interpreter replaces the functions of triton.language, in those of its modules that a
    function sees, at every launch of a kernel and at every call within one, which takes most of
    its time. Here they stay replaced from the first of these.
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
    """As in kernels that are compiled without debugging, sums and products of offsets are not
    computed again in 64 bits, to compare: at the sizes of these tests all of them are small, and it
    would take two fifths of the time.
    """
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
