"""A CUDA worker that lacks a requirement ends with an error that names the remedy."""

from dataclasses import replace

import pytest
import torch

from services.worker.backends.attention import AttentionLayer, StateLayer
from services.worker.backends.device import UnsuitableDevice
from services.worker.platforms.cuda_setup import (
    CudaSetup,
    check_batch_invariant,
    check_model,
    check_setup,
    check_states,
    find_setup,
)

GOOD = CudaSetup(
    device_name="NVIDIA H200",
    capability=(9, 0),
    compiler="/usr/bin/gcc",
    has_python_headers=True,
    triton="3.7.1",
    xformers="0.0.35",
)
LAYER = AttentionLayer(32, 8, 128, 128**-0.5)


def test_a_complete_setup_is_accepted() -> None:
    check_setup(GOOD)
    check_setup(replace(GOOD, triton="3.6.0", xformers="0.0.35+cu130", capability=(8, 0)))


def test_recurrent_layers_are_refused() -> None:
    check_states(())
    with pytest.raises(UnsuitableDevice, match=r"recurrent layers, .* set --device cpu"):
        check_states((StateLayer((((4, 4), torch.float32),)),))


@pytest.mark.parametrize(
    ("lack", "sentence"),
    [
        (
            {"device_name": None},
            "device is cuda, but torch finds no CUDA device; check the driver, and that torch "
            "was built for CUDA, or set --device cpu",
        ),
        (
            {"device_name": "Tesla T4", "capability": (7, 5)},
            "Tesla T4 has compute capability 7.5, and 8.0 is needed; use a newer GPU or set "
            "--device cpu",
        ),
        (
            {"xformers": None},
            "xFormers 0.0.35 is needed, and it is not installed; run pip install 'stepwell[gpu]'",
        ),
        (
            {"xformers": "0.0.34"},
            "xFormers 0.0.35 is needed, and 0.0.34 is installed; run pip install 'stepwell[gpu]'",
        ),
        (
            {"triton": "3.9.0"},
            "Triton 3.6 to 3.8 is needed, and 3.9.0 is installed; later ones cannot compile "
            "xFormers' paged kernel; run pip install 'triton>=3.6,<3.9'",
        ),
        (
            {"compiler": None},
            "Triton needs a C compiler to launch kernels, and there is none; install gcc or name "
            "one in CC",
        ),
    ],
)
def test_a_missing_part_is_named_with_its_remedy(lack: dict[str, object], sentence: str) -> None:
    with pytest.raises(UnsuitableDevice) as caught:
        check_setup(replace(GOOD, **lack))
    assert caught.value.message == sentence


def test_missing_headers_are_named_with_the_package_that_has_them() -> None:
    with pytest.raises(UnsuitableDevice, match=r"apt-get install python3\.\d+-dev$"):
        check_setup(replace(GOOD, has_python_headers=False))


def test_models_that_the_kernel_can_compute() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check_model((LAYER, replace(LAYER, window=4096)), 64, dtype)


def test_scores_with_a_cap_are_computed_without_the_kernel_in_heads_of_any_size() -> None:
    check_model((replace(LAYER, softcap=50.0, head_dim=96),), 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("layer", "block_size", "dtype", "sentence"),
    [
        (LAYER, 64, torch.float32, "dtype float32 is not supported on CUDA"),
        (LAYER, 48, torch.bfloat16, "block_size is 48, but on CUDA it must be 16, 32, 64, 128 or"),
        (
            replace(LAYER, head_dim=96),
            64,
            torch.bfloat16,
            "the model's attention heads have size 96",
        ),
    ],
)
def test_models_that_the_kernel_cannot_compute_are_refused(
    layer: AttentionLayer, block_size: int, dtype: torch.dtype, sentence: str
) -> None:
    with pytest.raises(UnsuitableDevice, match=sentence):
        check_model((LAYER, layer), block_size, dtype)


@pytest.mark.parametrize(
    ("layer", "is_native", "what"),
    [
        (LAYER, False, "models that transformers runs"),
        (replace(LAYER, softcap=50.0), True, "models that cap attention scores"),
    ],
)
def test_models_that_are_not_computed_the_same_in_every_batch(
    layer: AttentionLayer, is_native: bool, what: str
) -> None:
    check_batch_invariant((LAYER, replace(LAYER, window=64)), is_native=True)
    with pytest.raises(
        UnsuitableDevice, match=f"batch_invariant is not supported on CUDA for {what}"
    ):
        check_batch_invariant((LAYER, layer), is_native=is_native)


def test_find_setup_imports_no_package() -> None:
    setup = find_setup()
    assert (setup.device_name is None) == (not torch.cuda.is_available())
