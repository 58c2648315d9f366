"""The 8-bit codes and scales of keys and values equal those that NumPy computes, in torch and in
the cache of the C++ kernels. Attention over them equals attention over the dequantized numbers.
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.backends.attention import AttentionShape, Rotation
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.kv_codes import bytes_of_head, coded, decoded
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.paged_attention import NativePagedAttention
from services.worker.backends.torch.attend import rotate
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from tests.worker.conftest import Native
from tests.worker.unit.backends.test_native_paged import CASES, Case, Sequences

INT8 = KVCacheDtype.INT8_PER_TOKEN_HEAD
Floats = npt.NDArray[np.float32]


def numpy_codes(heads: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantizes heads [..., head_dim] to codes of the same shape, and scales [...]."""
    most = np.abs(heads).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most >= 1e-30)
    scales = np.where(most >= 1e-30, most / np.float32(127), np.float32(0))
    return np.rint(heads * inverse).astype(np.int8), scales[..., 0]


def scales_of(stored: torch.Tensor) -> Floats:
    return stored[..., -4:].contiguous().view(torch.float32)[..., 0].numpy()


@given(
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-36, 1e-29, 1e-8, 1e30]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_codes_are_numpys_and_elements_are_off_by_half_a_scale(
    dim: int, seed: int, magnitude: float, dtype: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    given_heads = torch.from_numpy(random.standard_normal((5, 3, dim)) * magnitude).to(dtype)
    given_heads[0, 0] = 0
    heads = given_heads.float().numpy()
    codes, scales = numpy_codes(heads)
    stored = coded(given_heads)
    assert stored.shape == (5, 3, bytes_of_head(dim))
    assert np.array_equal(stored[..., :dim].numpy(), codes)
    assert np.array_equal(scales_of(stored), scales)
    assert not stored[..., dim:-4].any()
    found = decoded(stored, dim, torch.float32).numpy()
    assert np.array_equal(found, codes * scales[..., None])
    bound = np.where(scales > 0, scales / 2, 1e-30)[..., None]
    assert (np.abs(found.astype(np.float64) - heads) <= 1.00001 * bound).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_head_that_is_not_finite_stays_so(bad: float) -> None:
    heads = torch.ones(2, 20)
    heads[0, 13] = bad
    found = decoded(coded(heads), 20, torch.float32)
    assert found[0].isnan().all()
    assert torch.equal(found[1], heads[1])


def tokens_of(pages: torch.Tensor, *, is_key: bool) -> torch.Tensor:
    """Converts the keys or the values of a native cache to the layout of torch's cache,
    [num_blocks, block_size, num_kv_heads, bytes].
    """
    num_blocks, block_size, heads, width = pages.shape
    if block_size % 16:
        return pages
    dim = width - 4
    records = pages.reshape(num_blocks, block_size // 16, heads, 16 * width)
    codes = records[..., : 16 * dim]
    scales = records[..., 16 * dim :].unflatten(-1, (16, 4))
    if is_key:
        codes = codes.unflatten(-1, (dim // 4, 16, 4)).transpose(-3, -2).flatten(-2)
        codes = codes ^ -128
    else:
        codes = codes.unflatten(-1, (dim // 16, 4, 16, 4)).permute(0, 1, 2, 4, 6, 3, 5)
        codes = codes.reshape(*records.shape[:3], 16, dim)
    tokens = torch.cat([codes, scales], -1)
    return tokens.transpose(2, 3).reshape(num_blocks, block_size, heads, width)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_native_cache_holds_the_same_codes(native: Native, case: Case) -> None:
    torch.manual_seed(3)
    sequences = Sequences([70, 33, 1], case.block_size)
    layout = sequences.grow([70, 33, 1])
    shape = shape_of(case, sequences.num_blocks, native.dtype)
    attentions = [
        NativePagedAttention(native.functions, LargePages(), shape),
        TorchPagedAttention(shape),
    ]
    heads, kv_heads = case.num_heads, case.num_kv_heads
    fused = torch.randn(104, heads + 2 * kv_heads, case.head_dim).to(native.dtype)
    fused[9] = 0
    for attention in attentions:
        parts = fused.clone().tensor_split((heads, heads + kv_heads), dim=1)
        attention.begin_step([layout])(0, *parts, None)
    slots = torch.from_numpy(layout.slot_mapping)
    for half, is_key in enumerate((True, False)):
        mine = tokens_of(attentions[0].pages[0][half], is_key=is_key)
        theirs = attentions[1].pages[0][half]
        dim = case.head_dim
        for part in (slice(0, dim), slice(-4, None)):
            assert torch.equal(
                mine.flatten(0, 1)[slots][..., part], theirs.flatten(0, 1)[slots][..., part]
            )


def shape_of(case: Case, num_blocks: int, dtype: torch.dtype) -> AttentionShape:
    return AttentionShape((case.layer,), case.block_size, num_blocks, dtype, kv_cache_dtype=INT8)


def expected_outputs(
    case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of one sequence over its dequantized keys and values, in float64."""
    repeats = case.num_heads // case.num_kv_heads
    keys, values = (
        decoded(coded(heads), case.head_dim, torch.float32).double().repeat_interleave(repeats, 1)
        for heads in (key, value)
    )
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * case.layer.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    length = len(query)
    ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
    hidden = ahead > 0
    if case.window is not None:
        hidden |= ahead <= -case.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pytest.mark.parametrize("make", ["native", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_over_dequantized_keys_and_values(
    native: Native, case: Case, make: str
) -> None:
    torch.manual_seed(5)
    length = 700
    sequences = Sequences([length], case.block_size)
    shape = shape_of(case, sequences.num_blocks, native.dtype)
    attention = (
        NativePagedAttention(native.functions, LargePages(), shape)
        if make == "native"
        else TorchPagedAttention(shape)
    )
    heads, kv_heads = case.num_heads, case.num_kv_heads
    fused = torch.randn(length, heads + 2 * kv_heads, case.head_dim)
    parts = fused.to(native.dtype).tensor_split((heads, heads + kv_heads), dim=1)
    rotation, turned = None, list(parts)
    if case.half:
        angles = torch.rand(length, case.half) * 6
        rotation = Rotation(angles.cos().to(native.dtype), angles.sin().to(native.dtype))
        turned[:2] = (rotate(part.clone(), rotation) for part in parts[:2])
    found, begin = [], 0
    for count in (300, 1, 1, 37, 64, 1, 296):
        end = begin + count
        own = [part[begin:end].clone() for part in parts]
        turn = rotation and Rotation(rotation.cos[begin:end], rotation.sin[begin:end])
        found.append(attention.begin_step([sequences.grow([count])])(0, *own, turn))
        begin = end
    expected = expected_outputs(case, *turned)
    error = torch.cat(found).double() - expected
    is_exact = native.dtype is torch.float32
    assert error.square().mean().sqrt() / expected.square().mean().sqrt() < (
        1e-4 if is_exact else 6e-3
    )
    assert error.abs().max() / expected.abs().max() < (1e-3 if is_exact else 2e-2)


def test_one_value_that_is_not_finite_reaches_only_those_that_see_it(native: Native) -> None:
    case = Case(2, 1, 32, 16, half=0, window=20)
    shape = shape_of(case, 5, native.dtype)
    attention = NativePagedAttention(native.functions, LargePages(), shape)
    sequences = Sequences([64], 16)
    heads = torch.randn(64, 4, 32).to(native.dtype)
    heads[30, 3, 7] = torch.inf
    output = attention.begin_step([sequences.grow([64])])(
        0, *heads.tensor_split((2, 3), dim=1), None
    )
    bad = output.isnan().all(1)
    assert torch.equal(bad, ~output.isfinite().any(1))
    assert bad.nonzero().flatten().tolist() == list(range(30, 50))
