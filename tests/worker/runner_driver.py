"""Drives a model runner as a scheduler does, with chunks, prefix hits and preemptions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from services.common.pool.kv_cache_groups import MambaCacheMode
from services.common.request.adapter import adapter_digest
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.worker.backends.attention import AttentionShape, PagedAttention
from services.worker.backends.choices import KernelsSetting, KVCacheDtype
from services.worker.backends.device import CpuDevice
from services.worker.backends.hybrid_cache import cache_of
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.core.batch.device_tokens import DeviceTokens
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.drafts.draft_model import DraftModel
from services.worker.core.drafts.draft_source import DraftSource, Proposer, ProposerSource
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.kv.kv_groups import (
    block_scales,
    group_layers,
    layer_kinds,
    state_block_sizes,
)
from services.worker.core.lockstep import Lockstep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import PipelineStage, StagedModel
from services.worker.core.step import AppendedBlocks, NewRequest, StepInput, StepOutput
from services.worker.core.worker import StepRunner
from services.worker.models.config import DtypeSetting
from services.worker.models.files.checkpoint import CPU, open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadedModel, LoadOptions, Model
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.platforms.cpu_kernels import select_kernels
from services.worker.sampling.logprobs import LogprobRows

GREEDY = SamplingParams(temperature=0)
MAX_MODEL_LEN = 512


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def build_runner(
    directory: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 600,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    dtype: torch.dtype = torch.float32,
    keeps_tokens_on_device: bool = False,
    kernels_setting: KernelsSetting = KernelsSetting.AUTO,
    batch_invariant: bool = True,
    ranks: Ranks = ALONE,
    lockstep: Lockstep | None = None,
    group: Group | None = None,
    around: Callable[[Model, PagedAttention], tuple[Model, PagedAttention]] | None = None,
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.ALIGN,
    adapters: Sequence[Path] = (),
    quantization: QuantizationSetting = QuantizationSetting.AUTO,
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    proposer: Proposer | None = None,
    draft_model: Path | None = None,
    source: DraftSource | None = None,
) -> ModelRunner:
    """A model runner for the model in a directory, or for one rank's part of the model. With
    `keeps_tokens_on_device`, sampled tokens stay on the logits' device, as on CUDA. `group` is the
    rank's group within its pipeline stage. `around` wraps model and attention. Up to four drafts
    for each request and step come from `proposer`, `source` or `draft_model` (a directory).
    """
    own = Membership() if group is None else group.membership
    kernels = select_kernels(
        kernels_setting, default_cache_directory(), lambda: None, batch_invariant=batch_invariant
    )
    checkpoint = open_checkpoint(directory)
    asked = DtypeSetting.BFLOAT16 if dtype is torch.bfloat16 else DtypeSetting.FLOAT32
    options = LoadOptions(
        *(MAX_MODEL_LEN, asked, None, own.stage, own.pipeline_parallel_size, quantization)
    )
    loaded = load_model(checkpoint, options, kernels, lambda *_: None, ranks)
    link = None if group is None else group.link
    kinds = layer_kinds(loaded.attention, kv_cache_dtype, scales_blocks=not loaded.states)
    groups = group_layers(kinds, len(loaded.states), mamba_cache_mode)
    shape = AttentionShape(
        loaded.own_attention,
        block_size,
        num_blocks,
        dtype,
        groups=tuple(loaded.own_layers(group.layers) for group in groups if not group.holds_states),
        states=loaded.states,
        state_groups=tuple(group.layers for group in groups if group.holds_states),
        kv_cache_dtype=kv_cache_dtype,
        block_scales=block_scales(groups),
    )
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=num_blocks,
        windows=tuple(group.window for group in groups),
        state_block_sizes=state_block_sizes(groups, block_size, MAX_MODEL_LEN),
        num_speculative_tokens=0 if proposer is draft_model is source is None else 4,
        block_scales=block_scales(groups),
    )
    device_tokens = DeviceTokens(CpuDevice(), max_num_seqs) if keeps_tokens_on_device else None
    attention, states = cache_of(kernels, shape)
    model = loaded.model
    if around is not None:
        model, attention = around(model, attention)
    if proposer is not None:
        source = ProposerSource(proposer)
    if draft_model is not None:
        source = _loaded_draft_model(draft_model, kernels, limits, asked, kv_cache_dtype, ranks)
    stage = None
    if link is not None:
        place = own.stage, own.pipeline_parallel_size
        stage = PipelineStage(*place, link, loaded.hidden_size, dtype)
        model = StagedModel(model, stage)
    return ModelRunner(
        model,
        attention,
        limits,
        device_tokens=device_tokens,
        lockstep=lockstep,
        stage=stage,
        states=states,
        adapters=_loaded_adapters(loaded, adapters) if adapters else None,
        drafter=None if source is None else Drafter(source, 4),
        row_sampler=kernels.row_sampler(),
    )


def _loaded_draft_model(
    directory: Path,
    kernels: Kernels,
    limits: BatchLimits,
    dtype: DtypeSetting,
    kv_cache_dtype: KVCacheDtype,
    ranks: Ranks,
) -> DraftModel:
    """A draft model, or this rank's part. It uses the first full-attention group's blocks."""
    options = LoadOptions(MAX_MODEL_LEN, dtype)
    loaded = load_model(open_checkpoint(directory), options, kernels, lambda *_: None, ranks)
    group = limits.windows.index(None)
    shape = AttentionShape(
        loaded.attention,
        limits.block_sizes[group],
        limits.num_blocks,
        loaded.dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    attention = kernels.paged_attention(shape)
    return DraftModel(
        loaded.model, attention, limits, group=group, max_model_len=loaded.max_model_len
    )


def _loaded_adapters(loaded: LoadedModel, directories: Sequence[Path]) -> LoraAdapters:
    """LoRA adapters of LoRA ranks up to 64. Requests name an adapter by the digest of its files."""
    assert loaded.lora is not None
    read = partial(loaded.lora.read, max_rank=64, device=CPU)
    adapters = LoraAdapters(read, len(directories))
    digests = [adapter_digest(directory) for directory in directories]
    for digest, directory in zip(digests, directories, strict=True):
        adapters.load(digest, directory, digests)
    return adapters


def appended(*grown: tuple[int, list[int]]) -> AppendedBlocks:
    """The new blocks of block tables. `grown` has pairs of a batch row and its new blocks."""
    return AppendedBlocks(
        rows=ints(*(row for row, _ in grown)),
        num_blocks=ints(*(len(block_ids) for _, block_ids in grown)),
        block_ids=ints(*(block for _, block_ids in grown for block in block_ids)),
    )


@dataclass
class Request:
    """A request of the driver. `tables` has its block table in each KV-cache group.

    `num_computed` includes the tokens of a prefix hit. `embeds` replace the first tokens of the
    prompt. Log-probabilities are stored in order of positions. When the request resumes after a
    preemption, the prompt's log-probabilities are replaced.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None
    embeds: PromptEmbeds | None = None
    adapter: Path | None = None
    prompt_rows: list[LogprobRows] = field(default_factory=list)
    sampled_rows: list[LogprobRows] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens

    def as_new(self) -> NewRequest:
        """The message with which a worker receives the request, which must have a row."""
        assert self.row is not None
        return NewRequest(
            row=self.row,
            token_ids=ints(*self.tokens),
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            block_tables=tuple(ints(*table) for table in self.tables),
            prompt_embeds=None if self.embeds is None else self.embeds.rest(self.num_computed),
            num_placeholders=0 if self.embeds is None else self.embeds.num_tokens,
            adapter_digest=b"" if self.adapter is None else adapter_digest(self.adapter),
        )


class Driver:
    """Runs requests step by step. Blocks are allocated in a shuffled order, and block tables grow
    block by block. Freed blocks keep their old contents and are allocated last. Blocks that have
    left a window are allocated first, or last if `keeps` is true. Blocks in `shared` are never
    allocated again.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        block_size: int,
        num_blocks: int,
        seed: int = 0,
        keeps: bool = False,
    ) -> None:
        self.runner = runner
        self.block_size = block_size
        self._windows = runner.limits.windows
        self._block_sizes = runner.limits.block_sizes
        self._first_state_group = runner.limits.first_state_group
        self._free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        self._keeps = keeps
        self.shared: set[int] = set()
        self._removed: list[int] = []
        self._rows = list(range(runner.limits.max_num_seqs))
        self._step = 0

    def step(self, scheduled: Sequence[tuple[Request, int]]) -> StepOutput:
        entering: list[NewRequest] = []
        grown: list[list[tuple[int, list[int]]]] = [[] for _ in self._windows]
        for request, count in scheduled:
            added = self._extend(request, request.num_computed + count)
            if request.row is None:
                request.row = self._rows.pop(0)
                request.prompt_rows.clear()
                entering.append(request.as_new())
            elif any(added):
                for group, blocks in enumerate(added):
                    grown[group].append((request.row, blocks))
        output = self.runner.execute(
            StepInput(
                generation=1,
                step=self._step,
                rows=ints(*(request.row for request, _ in scheduled)),
                num_scheduled_tokens=ints(*(count for _, count in scheduled)),
                num_computed_tokens=ints(*(request.num_computed for request, _ in scheduled)),
                removed_rows=ints(*self._removed),
                new_requests=tuple(entering),
                appended_blocks=tuple(appended(*of_group) for of_group in grown)
                if any(grown)
                else (),
                last_token_ids=ints(
                    *(
                        request.tokens[request.num_computed + count - 1]
                        for request, count in scheduled
                    )
                ),
            )
        )
        self._step += 1
        self._removed.clear()
        self._take(scheduled, output)
        return output

    def run(self, requests: Sequence[Request], *, chunk: int = 512) -> None:
        """Runs requests together to their ends. Prompts are computed in chunks."""
        while running := [request for request in requests if not request.finished]:
            self.step(
                [
                    (request, min(chunk, len(request.tokens) - request.num_computed))
                    for request in running
                ]
            )
            self.remove_finished(running)

    def remove_finished(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finished and request.row is not None:
                self.remove(request)

    def share(self, first: Request, follower: Request, num_blocks: int) -> None:
        """Simulates a prefix hit: the request `follower` starts with the blocks of `first` that its
        windows need. With several block sizes, the hit must end where blocks of all KV-cache groups
        end. With recurrent layers, a step of `first` must have ended there.
        """
        unit = math.lcm(*self._block_sizes[: self._first_state_group])
        follower.num_computed = num_tokens = num_blocks * self.block_size // unit * unit
        follower.tables = [
            table[: -(-num_tokens // size)]
            for table, size in zip(first.tables, self._block_sizes, strict=True)
        ]
        for table, seen in zip(follower.tables, self._first_seen(follower), strict=True):
            table[:seen] = [0] * seen
            self.shared.update(table)

    def remove(self, request: Request) -> None:
        """Removes a request from the batch. Its blocks are freed, but it keeps its tokens."""
        assert request.row is not None
        self._removed.append(request.row)
        self._rows.append(request.row)
        self._free[:0] = [block for table in request.tables for block in self._owned(table)]
        request.row = None
        request.tables = []
        request.num_computed = 0

    def _extend(self, request: Request, num_tokens: int) -> list[list[int]]:
        """Grows the request's block tables to `num_tokens`. Returns the new blocks of each."""
        if not request.tables:
            request.tables = [[] for _ in self._windows]
        added = [
            [self._free.pop() for _ in range(-(-num_tokens // size) - len(table))]
            for table, size in zip(request.tables, self._block_sizes, strict=True)
        ]
        for table, blocks in zip(request.tables, added, strict=True):
            table.extend(blocks)
        return added

    def _give_back(self, request: Request) -> None:
        """Frees blocks that have left a window. They are soon allocated again."""
        for table, seen in zip(request.tables, self._first_seen(request), strict=True):
            self._free += self._owned(table[:seen])
            table[:seen] = [0] * seen

    def _first_seen(self, request: Request) -> list[int]:
        """For each KV-cache group, the first block that the next token attends to. For recurrent
        states, the block of the last token.
        """
        attending = self._windows[: self._first_state_group]
        return [
            0 if window is None else max(0, request.num_computed - window + 1) // size
            for window, size in zip(attending, self._block_sizes, strict=False)
        ] + [
            max(0, request.num_computed - 1) // size
            for size in self._block_sizes[self._first_state_group :]
        ]

    def _owned(self, table: list[int]) -> list[int]:
        return [block for block in table if block and block not in self.shared]

    def _take(self, scheduled: Sequence[tuple[Request, int]], output: StepOutput) -> None:
        first = 0
        for index, rows in output.logprobs.items():
            request = scheduled[index][0]
            request.prompt_rows += [] if rows.prompt is None else [rows.prompt]
            request.sampled_rows += [] if rows.sampled is None else [rows.sampled]
        for (request, count), sampled in zip(scheduled, output.num_tokens.tolist(), strict=True):
            request.num_computed += count
            assert sampled == int(request.num_computed == len(request.tokens))
            request.output += output.token_ids[first : first + sampled].tolist()
            first += sampled
            if not self._keeps:
                self._give_back(request)
