"""With torch's CPU kernels, the bits of a row do not depend on the batch."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionLayer, AttentionShape, StepLayout
from services.worker.backends.choices import Activation
from services.worker.backends.torch.attend import row_multiple
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.backends.torch.packed_linear import in_tiles, rows_agree
from services.worker.backends.torch.paged_attention import TorchPagedAttention

DTYPES = [torch.float32, torch.bfloat16]
KERNELS = TorchKernels()


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def filled_up(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows, torch.zeros(KERNELS.padded_rows(len(rows)) - len(rows), rows.shape[1])))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "out"), [(64, 131), (1536, 576), (5632, 64)])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(
    width: int, out: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = KERNELS.linear(torch.randn(out, width).to(dtype), None)
    rows = torch.randn(130, width)
    whole = linear(filled_up(rows).to(dtype))
    for begin, end in ((0, 1), (129, 130), (3, 5), (7, 10), (1, 18), (60, 124)):
        some = linear(filled_up(rows[begin:end]).to(dtype))[: end - begin]
        assert torch.equal(some, whole[begin:end]), (begin, end)


def test_a_weight_whose_results_depend_on_the_number_of_rows_is_multiplied_in_tiles() -> None:
    weight = torch.eye(8)

    def by_number(x: torch.Tensor) -> torch.Tensor:
        return x @ weight * (1 + len(x) * 1e-3)

    rows = torch.randn(100, 8)
    assert rows_agree(lambda x: x @ weight, 8, torch.float32)
    assert not rows_agree(by_number, 8, torch.float32)
    whole = in_tiles(by_number, rows)
    assert torch.equal(whole, rows * (1 + 32 * 1e-3))
    assert torch.equal(in_tiles(by_number, rows[90:97]), whole[90:97])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [17, 100, 1536])
def test_a_row_of_a_gated_product_has_the_same_bits_in_any_batch(
    activation: Activation, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    identity = torch.eye(2 * width).to(dtype)
    gate = KERNELS.gated_linear(identity, None, activation)
    rows = torch.randn(200, 2 * width).mul(4)
    whole = gate(filled_up(rows).to(dtype))
    for begin, end in ((0, 1), (3, 8), (7, 110), (1, 198)):
        some = gate(filled_up(rows[begin:end]).to(dtype))[: end - begin]
        assert torch.equal(some, whole[begin:end]), (begin, end)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [17, 64, 576])
def test_a_row_of_a_norm_has_the_same_bits_in_any_batch(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(300, width).to(dtype), torch.randn(width).to(dtype)
    whole = KERNELS.rms_norm(rows, weight, 1e-6)
    for begin, end in ((0, 1), (3, 5), (7, 110), (1, 298)):
        some = KERNELS.rms_norm(rows[begin:end].clone(), weight, 1e-6)
        assert torch.equal(some, whole[begin:end]), (begin, end)


PLAIN = AttentionLayer(6, 2, 16, scale=0.25)
LAYERS = {
    "grouped heads": PLAIN,
    "one head of keys": AttentionLayer(5, 1, 64, scale=0.125),
    "one head": AttentionLayer(1, 1, 32, scale=0.2),
    "as many heads": AttentionLayer(3, 3, 80, scale=0.1),
    "window of 17": replace(PLAIN, window=17),
    "window of 600": replace(PLAIN, window=600),
    "capped": replace(PLAIN, softcap=2.0),
    "capped, window": replace(PLAIN, softcap=2.0, window=100),
}
BLOCK_SIZE, NUM_BLOCKS = 16, 700
LENGTHS = (1, 70, 300, 520, 1100, 1300)


class World:
    def __init__(self, layer: AttentionLayer, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(1)

        def numbers(heads: int) -> list[torch.Tensor]:
            return [
                torch.randn(length, heads, layer.head_dim, generator=random).to(dtype)
                for length in LENGTHS
            ]

        self._shape = AttentionShape((layer,), BLOCK_SIZE, NUM_BLOCKS, dtype)
        self._heads = [numbers(n) for n in (layer.num_heads, *[layer.num_kv_heads] * 2)]
        self.empty(seed=0)

    def empty(self, seed: int) -> None:
        """Replaces the cache by an empty one, whose blocks are assigned in another order."""
        self._attention = TorchPagedAttention(self._shape)
        width = -(-max(LENGTHS) // BLOCK_SIZE)
        blocks = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS))
        self._tables = blocks[: len(LENGTHS) * width].reshape(-1, width).astype(np.int32)

    def step(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Computes parts, each a tuple (sequence, begin, end) of the tokens [begin, end). Returns
        the result of each. Parts of one token must come first, ordered by `end`.
        """
        rows, begins, ends = (np.array(column, np.int32) for column in zip(*parts, strict=True))
        layout = StepLayout(
            num_decodes=int((ends - begins == 1).sum()),
            query_starts=np.cumsum([0, *(ends - begins)]).astype(np.int32),
            seq_lens=ends,
            rows=rows,
            tables=self._tables,
            block_size=BLOCK_SIZE,
        )
        given = [
            torch.cat([heads[row][begin:end] for row, begin, end in parts]) for heads in self._heads
        ]
        output = self._attention.begin_step([layout])(0, *given, None)
        return list(torch.split(output, (ends - begins).tolist()))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_attention_has_the_same_bits_for_whole_and_chunked_prompts_in_any_batch(
    layer: AttentionLayer, dtype: torch.dtype
) -> None:
    world = World(layer, dtype)
    whole = [world.step([(row, 0, length)])[0] for row, length in enumerate(LENGTHS)]

    def check(parts: list[tuple[int, int, int]]) -> None:
        for (row, begin, end), found in zip(parts, world.step(parts), strict=True):
            assert torch.equal(found, whole[row][begin:end]), (row, begin, end)

    world.empty(seed=1)
    check([(row, 0, length // 2) for row, length in enumerate(LENGTHS) if length > 2])
    check([(row, length // 2, length - 7) for row, length in enumerate(LENGTHS) if length > 20])
    check([(0, 0, 1), *((row, LENGTHS[row] - 7, LENGTHS[row] - 6) for row in range(1, 6))])
    check([(4, 1094, 1095), (1, 64, 69), (2, 294, 299), (3, 514, 519), (5, 1294, 1300)])
    check([(row, LENGTHS[row] - 1, LENGTHS[row]) for row in (1, 2)])
    check([(4, 1095, 1096)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_batch_invariance_no_rows_or_keys_are_padded(dtype: torch.dtype) -> None:
    """Without padding, torch computes single rows, and attends only to keys that a query sees."""
    torch.manual_seed(0)
    kernels = TorchKernels(batch_invariant=False)
    assert [kernels.padded_rows(rows) for rows in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 8]
    rows = torch.randn(1, 200).to(dtype)
    gates = kernels.gated_linear(torch.eye(200).to(dtype), None, Activation.SILU)
    assert torch.equal(gates(rows), F.silu(rows[:, :100]) * rows[:, 100:])

    keys, values = torch.randn(2, 70, PLAIN.num_kv_heads, PLAIN.head_dim).to(dtype)
    query = torch.randn(70, PLAIN.num_heads, PLAIN.head_dim).to(dtype)
    attention = kernels.paged_attention(AttentionShape((PLAIN,), 16, 6, dtype))
    tables = np.arange(1, 6, dtype=np.int32)[None]

    def step(begin: int, end: int) -> torch.Tensor:
        starts = np.array([0, end - begin], np.int32)
        lens, own = np.array([end], np.int32), slice(begin, end)
        layout = StepLayout(int(end - begin == 1), starts, lens, np.zeros(1, np.int32), tables, 16)
        return attention.begin_step([layout])(0, query[own], keys[own], values[own], None)

    step(0, 69)
    heads = query[69:].view(1, PLAIN.num_kv_heads, -1, PLAIN.head_dim)
    seen = (whole.transpose(0, 1)[None] for whole in (keys, values))
    mask = torch.zeros(1, 1, 1, 70, dtype=dtype)
    expected = F.scaled_dot_product_attention(heads, *seen, mask, scale=PLAIN.scale)
    assert torch.equal(step(69, 70), expected.reshape(1, -1))


def test_the_libraries_here_agree_from_four_rows_on() -> None:
    """The libraries of this machine make the slower method, with more padding, unnecessary."""
    assert row_multiple(PLAIN, torch.float32) == row_multiple(PLAIN, torch.bfloat16) == 4
