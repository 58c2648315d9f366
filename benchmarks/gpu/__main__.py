"""What the worker does on a GPU: is it right, and how near the memory's speed is it?

    python -u -m benchmarks.gpu                        # all of it, about ten minutes
    python -u -m benchmarks.gpu correctness attention  # some parts, about five
    python -u -m benchmarks.gpu model                  # about five, 75 GB of GPU memory

* correctness: mixed batches and recorded decodes through xFormers against attention written out;
  grouped experts and sampling against the host's.
* attention: bytes of keys and values that decodes read a second, beside a plain copy's.
* model: a random model of 8 billion parameters, Llama 3.1's shape, in bfloat16: log-probabilities
  beside transformers', bytes that a decode step reads, and tokens a second beside transformers'
  continuous batching.
* invariance: whether what --batch-invariant computes is the same bits in any company, and its
  price: products beside cuBLAS's, decodes' attention beside that with split keys.

Needs torch, numpy, xFormers and Triton (`stepwell[gpu]`), for the last part transformers; no other
package, no contract and no service. What fails is told where it belongs, and the rest goes on.
Exits with 1 where something is wrong, or where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.backends.attention import AttentionLayer, AttentionShape, StepLayout
from services.worker.backends.cuda.device import CudaDevice
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.kernels import Kernels
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.cuda_setup import find_setup

if TYPE_CHECKING:
    from benchmarks.gpu.attention_check import Case

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
MOST_LOGPROB = 1e-4
COPY_BYTES = 2**30
CACHE_BYTES = 512 * 2**20
"""Keys and values that one measurement reads: several times what a GPU's cache holds."""
BATCHES = (1, 16, 64, 256)
CONTEXT, BLOCK_SIZE = 4096, 64
LAYER = AttentionLayer(32, 8, 128, 128**-0.5)
PRODUCTS = ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256))


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that the command line names. The status to exit with."""
    parts = {
        "correctness": correctness,
        "attention": attention,
        "invariance": invariance,
        "model": model,
    }
    parser = argparse.ArgumentParser(description="measures the worker on a GPU")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)} (default: all)")
    chosen = parser.parse_args(arguments).parts or list(parts)
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        parser.error(f"there is no part {unknown[0]}")
    if not torch.cuda.is_available():
        print("There is no GPU here, so nothing was run.", file=sys.stderr)
        return 1
    try:
        platform = CudaPlatform()
    except UnsuitableDevice as error:
        print(error.message, file=sys.stderr)
        return 1
    setup = find_setup()
    print(f"{setup.device_name}, torch {torch.__version__}, Triton {setup.triton}, ", end="")
    print(f"xFormers {setup.xformers}, {platform.device.num_processors} multiprocessors")
    copy = copy_bandwidth()
    print(f"copy bandwidth: {copy / 1e9:.0f} GB/s, read and written together")
    results = [tried(partial(parts[name], platform, copy), f"\n{name}") for name in chosen]
    return 0 if all(results) else 1


def tried(work: Callable[[], bool], name: str) -> bool:
    """What `work` says; False, and its error printed behind `name`, where it fails."""
    try:
        return work()
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        print(f"{name} | FAILED: {type(error).__name__}: {told} |", flush=True)
        return False


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """The shortest of several runs on the device."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[3:])


def correctness(platform: CudaPlatform, _copy: float) -> bool:
    """Prints the largest difference of every case; whether all are within their tolerance."""
    print("\n| case | mixed | recorded | seconds, compiling included | |")
    print("| --- | ---: | ---: | ---: | --- |")
    right = [tried(partial(is_right, case), f"| {named(case)}") for case in cases()]
    right.append(tried(lambda: splits(platform.device), "| splits"))
    right.append(tried(lambda: operations(platform.kernels()), "| operations"))
    return all(right)


def operations(kernels: Kernels) -> bool:
    """Prints how what is no attention differs from the host's; whether that is rounding."""
    from benchmarks.gpu.operations import experts_difference, sampling_differences  # noqa: PLC0415

    torch.manual_seed(1)
    others, logprobs = sampling_differences(CudaDevice())
    good = others <= 1 and logprobs < MOST_LOGPROB
    print(f"\nsampling: {others} other tokens, log-probabilities within {logprobs:.1e} ", end="")
    print(verdict(good), flush=True)
    if not kernels.groups_experts(torch.bfloat16, 256):
        print("experts: not grouped on this GPU")
        return good
    experts = experts_difference(CudaDevice(), torch.bfloat16)
    is_rounding = experts < TOLERANCE[torch.bfloat16]
    print(f"experts: grouped ones differ by {experts:.1e} {verdict(is_rounding)}", flush=True)
    return good and is_rounding


def is_right(case: Case) -> bool:
    """Prints the case's differences; whether they are within its tolerance.

    What has a cap on scores is not recorded.
    """
    from benchmarks.gpu.attention_check import PagedWorld  # noqa: PLC0415

    torch.manual_seed(1)
    begun = time.monotonic()
    world = PagedWorld(case, CudaDevice(), 7, 2048)
    world.remember([0, 37, 300, 1900, 45, 700, 0])
    mixed = world.step([1, 1, 1, 1, 17, 300, 3])
    recorded = 0.0
    if case.softcap is None:
        world = PagedWorld(case, CudaDevice(), 33, 2048)
        world.remember([(61 * sequence) % 1990 for sequence in range(33)])
        recorded = world.recorded_steps(4)
    took = time.monotonic() - begun
    good = max(mixed, recorded) < TOLERANCE[case.dtype]
    figures = f"{mixed:.1e} | {recorded:.1e} | {took:.1f}"
    print(f"| {named(case)} | {figures} | {verdict(good)} |", flush=True)
    return good


def verdict(good: bool) -> str:
    """Nothing, or that something is wrong."""
    return "" if good else "WRONG"


def cases() -> Iterator[Case]:
    """Page sizes, ratios of heads, sizes of heads, windows and data types."""
    from benchmarks.gpu.attention_check import Case  # noqa: PLC0415

    for block_size in (16, 32, 64, 128, 256):
        yield Case(block_size, 32, 8, 128, dtype=torch.bfloat16)
    yield Case(64, 32, 8, 128, dtype=torch.float16)
    for heads, head_dim in product(((8, 8), (8, 1)), (64, 128)):
        yield Case(64, *heads, head_dim, dtype=torch.bfloat16)
    for head_dim in (256, 512):
        yield Case(64, 8, 4, head_dim, dtype=torch.bfloat16)
    for window in (7, 100, 512):
        yield Case(64, 32, 8, 128, window=window, dtype=torch.bfloat16)
    for capped in (None, 100):
        yield Case(64, 8, 4, 256, window=capped, dtype=torch.bfloat16, softcap=50.0)


def splits(device: CudaDevice) -> bool:
    """Every number of splits, at batches beyond which the kernel that joins them changes."""
    from benchmarks.gpu.attention_check import Case, PagedWorld  # noqa: PLC0415
    from services.worker.backends.cuda.xformers_ops import PagedOps  # noqa: PLC0415

    print("\n| splits | batch | largest difference to one split | |\n| ---: | ---: | ---: | --- |")
    right = True
    case = Case(64, 32, 8, 128, dtype=torch.bfloat16)
    ops, there = PagedOps(case.layer, case.block_size), device.torch_device
    for batch in (1, 4, 32):
        world = PagedWorld(case, device, batch, 8192)
        world.remember([8192 - 131 * sequence for sequence in range(batch)])
        tables = device.upload(world.tables)
        bias = ops.padded_bias([1] * batch, [len(keys) for keys in world.keys], tables)
        query = torch.randn(batch, 32, 128, device=there, dtype=case.dtype)
        keys, values = world.attention.pools(0)
        whole = ops.attend(query, keys, values, bias, 1)
        for number in (2, 4, 8, 16, 32, 64):
            difference = float((ops.attend(query, keys, values, bias, number) - whole).abs().max())
            good = difference < TOLERANCE[case.dtype]
            right &= good
            print(f"| {number} | {batch} | {difference:.1e} | {verdict(good)} |", flush=True)
    return right


def named(case: Case) -> str:
    """The case in a few words."""
    name = str(case.dtype).removeprefix("torch.")
    heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"
    window = "" if case.window is None else f", window {case.window}"
    cap = "" if case.softcap is None else f", scores up to {case.softcap:.0f}"
    return f"{name}, pages of {case.block_size}, {heads}{window}{cap}"


def attention(_platform: CudaPlatform, copy: float) -> bool:
    """Prints how fast decodes read their keys and values, recorded, one layer after the other."""
    print("\n| batch | context | µs a layer | GB/s of keys and values | of copy bandwidth |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for batch in BATCHES:
        size = batch * CONTEXT * 2 * LAYER.num_kv_heads * LAYER.head_dim * 2
        num_layers = max(-(-CACHE_BYTES // size), 1)
        took = seconds(decodes(CudaDevice(), batch, num_layers)) / num_layers
        rate = size / took
        figures = f"{took * 1e6:.0f} | {rate / 1e9:.0f} | {rate / copy:.0%}"
        print(f"| {batch} | {CONTEXT} | {figures} |", flush=True)
    return True


def invariance(platform: CudaPlatform, _copy: float) -> bool:
    """Prints which rows of products and of attention differ with what is computed with them, and
    the price of that none does; whether none does.
    """
    return all(
        [
            tried(lambda: invariant_products(platform.device), "| products"),
            tried(lambda: invariant_attention(platform.device), "| attention"),
            tried(invariance_price, "| price of attention"),
        ]
    )


def invariant_products(device: CudaDevice) -> bool:
    """Products by the weights of an 8-billion-parameter Llama."""
    from benchmarks.gpu.invariance_check import ROWS, products_differ  # noqa: PLC0415
    from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear  # noqa: PLC0415

    print("\n| product | rows | µs | cuBLAS µs | price |\n| --- | ---: | ---: | ---: | ---: |")
    right = True
    for width, out in PRODUCTS:
        differing = products_differ(device, torch.bfloat16, width, out)
        right &= not differing
        weight = torch.randn(out, width, device=device.torch_device).bfloat16()
        linear = FixedTilesLinear(weight)
        for count in ROWS:
            rows = torch.randn(count, width, device=device.torch_device).bfloat16()
            ours = seconds(partial(linear, rows))
            theirs = seconds(partial(torch.nn.functional.linear, rows, weight))
            figures = f"{ours * 1e6:.0f} | {theirs * 1e6:.0f} | {ours / theirs:.2f}"
            print(f"| {width} x {out} | {count} | {figures} |", flush=True)
        print(f"| {width} x {out} | differing: {differing} | | | {verdict(not differing)} |")
    return right


def invariant_attention(device: CudaDevice) -> bool:
    """Prompts whole, in chunks and token by token, beside others."""
    from benchmarks.gpu.invariance_check import InvariantWorld  # noqa: PLC0415

    print("\n| attention | tokens that differ | |\n| --- | --- | --- |")
    right = True
    for case in cases():
        if case.softcap is not None:
            continue
        world = InvariantWorld(case, device, [1, 37, 300, 1900])
        cuts = [
            [(1, 0, 20), (2, 0, 7), (3, 0, 1000)],
            [(1, 20, 21), (2, 7, 8), (3, 1000, 1001)],
            [(0, 0, 1), (1, 21, 37), (2, 8, 299), (3, 1001, 1899)],
            [(2, 299, 300), (3, 1899, 1900)],
        ]
        differing = world.differing(cuts)
        right &= not differing
        print(f"| {named(case)} | {differing} | {verdict(not differing)} |", flush=True)
    return right


def invariance_price() -> bool:
    """Decodes' attention with and without it."""
    print(
        "\n| batch | µs a layer | with --batch-invariant | price |\n| ---: | ---: | ---: | ---: |"
    )
    for batch in BATCHES:
        plain, invariant = (
            seconds(decodes(CudaDevice(), batch, 1, batch_invariant=mode)) for mode in (False, True)
        )
        figures = f"{plain * 1e6:.0f} | {invariant * 1e6:.0f} | {invariant / plain:.2f}"
        print(f"| {batch} | {figures} |", flush=True)
    return True


def decodes(
    device: CudaDevice, batch: int, num_layers: int, *, batch_invariant: bool = False
) -> Callable[[], torch.Tensor]:
    """One decode of `batch` sequences through so many layers' attention, recorded."""
    from services.worker.backends.cuda.paged_attention import XformersPagedAttention  # noqa: PLC0415

    width = CONTEXT // BLOCK_SIZE
    shape = AttentionShape(
        (LAYER,) * num_layers, BLOCK_SIZE, batch * width + 1, torch.bfloat16, device.torch_device
    )
    attention = XformersPagedAttention(shape, device, width, batch_invariant=batch_invariant)
    step = attention.decode_step(batch)
    blocks = 1 + np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = blocks.reshape(batch, width)
    step.set(
        [
            StepLayout(
                num_decodes=batch,
                query_starts=np.arange(batch + 1, dtype=np.int32),
                seq_lens=np.full(batch, CONTEXT, np.int32),
                rows=np.arange(batch, dtype=np.int32),
                tables=tables,
                block_size=BLOCK_SIZE,
            )
        ]
    )
    query, key, value = (
        torch.randn(batch, heads, LAYER.head_dim, device=device.torch_device).bfloat16()
        for heads in (LAYER.num_heads, LAYER.num_kv_heads, LAYER.num_kv_heads)
    )

    def every_layer() -> torch.Tensor:
        for index in range(num_layers):
            output = step(index, query, key, value, None)
        return output

    return device.record(every_layer)


def model(platform: CudaPlatform, copy: float) -> bool:
    """See gpu_model."""
    from benchmarks.gpu.model import measure  # noqa: PLC0415

    return measure(platform, copy)


if __name__ == "__main__":
    sys.exit(main())
