"""Compares attention on a GPU with plain attention, and other operations with the host's."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.gpu.attention_check import AttentionCheck, Case
from benchmarks.gpu.cases import TOLERANCE, cases, named
from benchmarks.gpu.operations import experts_difference, sampling_differences
from benchmarks.gpu.outcome import attempt, verdict
from services.worker.backends.cuda.device import CudaDevice
from services.worker.backends.cuda.xformers_ops import PagedOps
from services.worker.backends.kernels import Kernels
from services.worker.platforms.cuda import CudaPlatform

MOST_LOGPROB = 1e-4


def run(platform: CudaPlatform, _copy: float) -> bool:
    """Prints each case's largest difference. Returns whether all are within their tolerances."""
    print("\n| case | mixed | recorded | seconds, compiling included | |")
    print("| --- | ---: | ---: | ---: | --- |")
    right = [attempt(partial(is_right, case), f"| {named(case)}") for case in cases()]
    right.append(attempt(many_lanes, "| many lanes"))
    right.append(attempt(lambda: splits(platform.device), "| splits"))
    right.append(attempt(lambda: operations(platform.kernels()), "| operations"))
    return all(right)


def is_right(case: Case) -> bool:
    """Prints the case's differences. Returns whether they are within its tolerance.

    Decodes are checked as recorded programs (CUDA graphs), too, except in cases with a cap on
    scores.
    """
    torch.manual_seed(1)
    begun = time.monotonic()
    check = AttentionCheck(case, CudaDevice(), 7, 2048)
    check.store([0, 37, 300, 1900, 45, 700, 0])
    mixed = check.step([1, 1, 1, 1, 17, 300, 3])
    recorded = 0.0
    if case.softcap is None:
        check = AttentionCheck(case, CudaDevice(), 33, 2048)
        check.store([(61 * sequence) % 1990 for sequence in range(33)])
        recorded = check.recorded_steps(4)
    took = time.monotonic() - begun
    good = max(mixed, recorded) < TOLERANCE[case.dtype]
    figures = f"{mixed:.1e} | {recorded:.1e} | {took:.1f}"
    print(f"| {named(case)} | {figures} | {verdict(good)} |", flush=True)
    return good


def many_lanes() -> bool:
    """Prints the largest difference in a step whose lanes exceed the limits of a grid."""
    case = Case(64, 32, 8, 128, window=100, dtype=torch.bfloat16)
    check = AttentionCheck(case, CudaDevice(), 4, 4096)
    check.store([50] * 4)
    difference = check.step([2100] * 4)
    good = difference < TOLERANCE[case.dtype]
    print(f"| many lanes | {difference:.1e} | | | {verdict(good)} |", flush=True)
    return good


def splits(device: CudaDevice) -> bool:
    """Compares attention in which the keys are split, for every number of splits, with attention
    over all keys at once.

    Small and large batches are checked, because different kernels join the results of the splits.
    """
    print("\n| splits | batch | largest difference to one split | |\n| ---: | ---: | ---: | --- |")
    right = True
    case = Case(64, 32, 8, 128, dtype=torch.bfloat16)
    ops, there = PagedOps(case.layer, case.block_size), device.torch_device
    for batch in (1, 4, 32):
        check = AttentionCheck(case, device, batch, 8192)
        check.store([8192 - 131 * sequence for sequence in range(batch)])
        tables = device.upload(check.tables)
        bias = ops.padded_bias([1] * batch, [len(keys) for keys in check.keys], tables)
        query = torch.randn(batch, 32, 128, device=there, dtype=case.dtype)
        keys, values = check.attention.pools(0)
        whole = ops.attend(query, keys, values, bias, ops.split_k(1))
        for number in (2, 4, 8, 16, 32, 64):
            parted = ops.attend(query, keys, values, bias, ops.split_k(number))
            difference = float((parted - whole).abs().max())
            good = difference < TOLERANCE[case.dtype]
            right &= good
            print(f"| {number} | {batch} | {difference:.1e} | {verdict(good)} |", flush=True)
    return right


def operations(kernels: Kernels) -> bool:
    """Prints how sampling and grouped experts differ from the host's results. Returns whether the
    differences are small enough to be rounding errors.
    """
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
