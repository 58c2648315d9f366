"""Builds a worker from its settings: reads the model, sizes the cache, warms up."""

import gc
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from services.common.errors import InvalidArgument
from services.common.tokenizer_files import tokenizer_fingerprint
from services.worker.backends.attention import AttentionShape
from services.worker.backends.lora import PackedLora
from services.worker.backends.out_of_memory import NotEnoughMemory, memory_for
from services.worker.core.drafter import Drafter
from services.worker.core.errors import NoSpeculation, NoTier
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.input_batch import BatchLimits
from services.worker.core.kv_cache import (
    KVCacheDemand,
    KVCacheMemory,
    KVCacheSizing,
    size_kv_cache,
)
from services.worker.core.kv_groups import LayerGroup, group_layers, state_block_sizes
from services.worker.core.kv_tier import tier_memory
from services.worker.core.lockstep import Lockstep
from services.worker.core.lora_adapters import LoraAdapters
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import PipelineStage
from services.worker.core.pooler import PromptPooler, vector_end
from services.worker.core.worker import Worker, WorkerDescription
from services.worker.models.checkpoint import Checkpoint, open_checkpoint
from services.worker.models.errors import ModelError, UnsupportedModel
from services.worker.models.load import load_model, takes_whole_prompts
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.models.pooling_config import PoolingConfig, read_pooling
from services.worker.models.quantization import QuantizationSetting
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.parallel.ranks import ALONE
from services.worker.platform_choice import (
    is_batch_invariant,
    num_local_workers,
    select_platform,
)
from services.worker.platforms.interface import Parts
from services.worker.platforms.machine import usable_processors
from services.worker.platforms.prompt_shapes import run_prompts
from services.worker.platforms.threads import choose_threads
from services.worker.sampling.grammar import Grammars, model_compiler
from services.worker.settings import WorkerSettings
from services.worker.speculation.config import parse_speculative_config
from services.worker.speculation.ngram import NgramProposer

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


def load_worker(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Worker:
    """Builds a worker, with as many threads as this process should compute with. Raises as
    `build_worker` does.
    """
    num_sharers = num_local_workers(settings, group)
    threads = choose_threads(usable_processors(), num_sharers, settings.num_threads)
    torch.set_num_threads(threads.num_threads)
    began = time.monotonic()
    worker = build_worker(settings, uuid.uuid4().hex, checkpoint_reached, group)
    # What is loaded stays: a full collection between two steps need not visit it.
    gc.collect()
    gc.freeze()
    took = time.monotonic() - began
    logger.info("loaded and warm after %.1f s, computing with %s", took, threads)
    return worker


def build_worker(
    settings: WorkerSettings,
    incarnation: str,
    checkpoint_reached: Callable[[], None],
    group: Group | None = None,
) -> Worker:
    """Loads the model and warms up, in the thread that will compute; with a `group`, as one of its
    ranks.

    `checkpoint_reached` is called many times, and may raise to end the start. Raises ModelError for
    a directory that cannot be served, KVCacheTooSmall or NotEnoughMemory if memory is too small,
    UnsuitableDevice, KernelsUnavailable, and GroupBroken if the ranks of the group do not match.
    """
    return _Builder(settings, checkpoint_reached, group).build(incarnation)


class _Builder:
    """Builds the worker of these settings on the platform that they choose."""

    def __init__(
        self, settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
    ) -> None:
        self._settings = settings
        self._checkpoint_reached = checkpoint_reached
        self._group = group
        self._membership = Membership() if group is None else group.membership
        self._platform = select_platform(settings, checkpoint_reached, group)
        self._ranks = ALONE if group is None else group.ranks_on(self._platform.torch_device)

    def build(self, incarnation: str) -> Worker:
        """See build_worker."""
        settings, platform, ranks = self._settings, self._platform, self._ranks
        checkpoint = open_checkpoint(settings.model, platform.torch_device)
        pooling = read_pooling(settings.model, settings.runner)
        if pooling is not None and takes_whole_prompts(settings.model):
            return self._build_whole(checkpoint, pooling, incarnation)
        parts, groups = self._load(checkpoint, pooling)
        loaded, block_size = parts.loaded, parts.shape.block_size
        platform.check(parts.shape, loaded)
        fingerprint = model_fingerprint(
            *(checkpoint, block_size, _name(loaded.dtype), loaded.rope_length, groups, pooling),
            settings.quantization,
        )
        if self._group is not None:
            self._group.require_same(self._in_common(parts, fingerprint))
            every, explain = settings.check_ranks_every_steps, self._group.watch.explain
            lockstep = Lockstep(ranks, every, explain, self._membership.rank)
            parts = replace(parts, lockstep=lockstep, stage=_stage(self._group, loaded))
        parts = self._with_drafter(self._with_tier(parts))
        adapters = self._adapters(parts.loaded)
        parts = replace(parts, grammars=self._grammars(parts), adapters=adapters)
        sizing = self._size_kv_cache(parts, groups)
        for line in sizing.explanation.split("; "):
            logger.info("KV cache: %s", line)
        parts = parts.sized(sizing.num_blocks, sizing.max_model_len)
        description = WorkerDescription(
            incarnation=incarnation,
            model_name=settings.served_model_name or settings.model.resolve().name,
            fingerprint=fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
            max_model_len=sizing.max_model_len,
            vocab_size=loaded.vocab_size,
            hidden_size=loaded.hidden_size,
            eos_token_ids=loaded.eos_token_ids,
            groups=groups,
            block_size=block_size,
            num_blocks=sizing.num_blocks,
            bytes_per_block=parts.shape.bytes_per_block,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_sizing=sizing.explanation,
            dtype=_name(loaded.dtype),
            rank=self._membership.rank,
            world_size=self._membership.size,
            pipeline_parallel_size=self._membership.pipeline_parallel_size,
            pooler=None if parts.pooler is None else parts.pooler.end.pooler,
            num_tier_blocks=parts.limits.num_tier_blocks,
            max_loras=settings.max_loras if settings.enable_lora else 0,
            max_cpu_loras=settings.num_lora_places,
            num_speculative_tokens=parts.limits.num_speculative_tokens,
            num_speculative_rows=parts.limits.num_speculative_rows,
        )
        return Worker(self._warm_runner(parts), description, parts.grammars, adapters)

    def _adapters(self, loaded: LoadedModel) -> LoraAdapters | None:
        """What holds adapters; None if none are served. Raises UnsupportedModel if they are to be
        and the model takes none.
        """
        settings, device = self._settings, self._platform.torch_device
        num_places, reader = settings.num_lora_places, loaded.lora
        if not num_places:
            return None
        if reader is None:
            raise UnsupportedModel(
                settings.model / "config.json",
                f"enable_lora: architecture {loaded.architecture} takes no adapters here",
            )

        def read(directory: Path) -> PackedLora:
            try:
                return reader.read(directory, settings.max_lora_rank, device)
            except ModelError as error:
                raise InvalidArgument(error.message, field="path") from error

        return LoraAdapters(read, num_places)

    def _grammars(self, parts: Parts) -> Grammars | None:
        """What holds outputs to grammars, where this rank samples."""
        if parts.pooler is not None or not (parts.stage is None or parts.stage.is_last):
            return None
        loaded = parts.loaded
        return Grammars(
            partial(model_compiler, self._settings.model, loaded.vocab_size, loaded.eos_token_ids)
        )

    def _build_whole(
        self, checkpoint: Checkpoint, pooling: PoolingConfig, incarnation: str
    ) -> Worker:
        """A worker for a model that takes whole prompts. It has no KV cache: blocks are only
        counted, and there are enough for as many of the longest prompts as may run.
        """
        settings = self._settings
        if self._ranks.size > 1:
            raise UnsupportedModel(
                settings.model / "config.json", "an encoder is not divided among ranks"
            )
        if settings.quantization is not QuantizationSetting.AUTO:
            raise UnsupportedModel(
                settings.model / "config.json",
                f"quantization {settings.quantization.value}: an encoder has no native code",
            )
        if settings.enable_lora:
            raise UnsupportedModel(
                settings.model / "config.json", "enable_lora: an encoder takes no adapters here"
            )
        if settings.speculative_config is not None:
            raise NoSpeculation("speculative_config: this model answers with vectors, not tokens")
        if settings.kv_offloading_size is not None:
            raise NoTier("kv_offloading_size: a model that takes whole prompts caches nothing")
        # Only here, since importing transformers takes seconds and a hundred megabytes.
        from services.worker.build_whole import build_whole  # noqa: PLC0415

        options = LoadOptions(settings.max_model_len, self._platform.dtype(settings.dtype), pooling)
        with memory_for("the weights", "use a machine with more, or a smaller dtype"):
            return build_whole(
                settings,
                checkpoint,
                options,
                incarnation,
                block_size=settings.block_size or self._platform.default_block_size,
            )

    def _load(
        self, checkpoint: Checkpoint, pooling: PoolingConfig | None
    ) -> tuple[Parts, tuple[LayerGroup, ...]]:
        """The model, or this rank's part of it, in memory, with a cache without blocks; and the
        groups of its layers.
        """
        settings, platform, kernels = self._settings, self._platform, self._platform.kernels()

        def wait_for_ranks() -> None:
            if self._group is not None:
                self._group.gather("loaded", "")

        options = LoadOptions(
            settings.max_model_len,
            platform.dtype(settings.dtype),
            pooling,
            self._membership.stage,
            self._membership.pipeline_parallel_size,
            settings.quantization,
        )
        weights = f"the weights ({checkpoint.num_bytes / 2**20:.0f} MiB in their files)"
        with memory_for(weights, "use a machine with more, a smaller dtype, or more ranks"):
            layer_read = self._progress("loading layers")
            loaded = load_model(
                checkpoint, options, kernels, layer_read, self._ranks, wait_for_ranks
            )
        groups = group_layers(
            [layer.window for layer in loaded.attention],
            len(loaded.states),
            settings.mamba_cache_mode,
        )
        shape = AttentionShape(
            loaded.own_attention,
            platform.default_block_size,
            num_blocks=0,
            dtype=loaded.dtype,
            device=platform.torch_device,
            groups=tuple(
                loaded.own_layers(group.layers) for group in groups if not group.holds_states
            ),
            states=loaded.states,
            state_groups=tuple(group.layers for group in groups if group.holds_states),
        )
        block_size = settings.block_size or shape.block_size_for_states
        shape = replace(shape, block_size=block_size)
        limits = BatchLimits(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            vocab_size=loaded.vocab_size,
            block_size=block_size,
            num_blocks=0,
            windows=tuple(group.window for group in groups),
            state_block_sizes=state_block_sizes(groups, block_size, loaded.max_model_len),
        )
        pooler = None if pooling is None else _prompt_pooler(loaded, pooling)
        return Parts(loaded, kernels, shape, limits, pooler=pooler), groups

    def _in_common(self, parts: Parts, fingerprint: bytes) -> dict[str, str]:
        """Values, by name, that must be the same on all ranks."""
        settings = self._settings
        return {
            "the model": fingerprint.hex()[:16],
            "dtype": _name(parts.loaded.dtype),
            "max_model_len": str(parts.loaded.max_model_len),
            "max_num_seqs": str(settings.max_num_seqs),
            "max_num_batched_tokens": str(settings.max_num_batched_tokens),
            "check_ranks_every_steps": str(settings.check_ranks_every_steps),
            "max_cpu_loras": str(settings.num_lora_places),
            "max_lora_rank": str(settings.max_lora_rank),
            "speculative_config": str(settings.speculative_config),
            "batch_invariant": str(is_batch_invariant(settings, parts.shape.device)),
            "what computes": type(parts.kernels).__name__,
        }

    def _with_drafter(self, parts: Parts) -> Parts:
        """The parts with what proposes drafts, if the settings ask for it."""
        if self._settings.speculative_config is None:
            return parts
        if parts.pooler is not None:
            raise NoSpeculation("speculative_config: this model answers with vectors, not tokens")
        if parts.limits.state_block_sizes:
            raise NoSpeculation("speculative_config: recurrent layers verify no drafts")
        if self._membership.pipeline_parallel_size > 1:
            raise NoSpeculation("speculative_config: pipeline stages verify no drafts")
        config = parse_speculative_config(self._settings.speculative_config)
        num_rows = config.num_rows
        limits = replace(
            parts.limits,
            num_speculative_tokens=config.num_speculative_tokens,
            num_speculative_rows=self._platform.num_speculative_rows
            if num_rows is None
            else num_rows,
        )
        drafter = Drafter(NgramProposer(config), config.num_speculative_tokens)
        return replace(parts, limits=limits, drafter=drafter)

    def _with_tier(self, parts: Parts) -> Parts:
        """The parts with this rank's share of the memory for offloaded blocks, of which all ranks
        have equally many, since each keeps its part of the same ones.
        """
        size = self._settings.kv_offloading_size
        if size is None:
            return parts
        if not self._platform.has_tier:
            raise NoTier("kv_offloading_size: only workers on the CPU keep offloaded blocks")
        if parts.limits.state_block_sizes:
            raise NoTier("kv_offloading_size: states of recurrent layers are not offloaded")
        num_ranks, block = self._membership.size, parts.shape.bytes_per_block
        num_bytes = int(size * 2**30) // num_ranks
        num_blocks = num_bytes // block
        if not num_blocks:
            raise NoTier(
                f"kv_offloading_size: {size:g} GiB do not hold a block of {block} bytes on each of "
                f"{num_ranks} ranks"
            )
        available = self._platform.free_memory(parts).of_bytes
        if num_blocks * block > available:
            raise NotEnoughMemory(
                f"kv_offloading_size: {num_blocks * block / 2**20:.1f} MiB are asked for, and "
                f"there are {available / 2**20:.1f} MiB"
            )
        if self._group is not None:
            num_blocks = self._group.smallest("num_tier_blocks", num_blocks)
        with memory_for("offloaded blocks", "lower kv_offloading_size"):
            memory = tier_memory(num_blocks, block)
        logger.info(
            "KV tier: %d blocks, %.1f MiB: kv_offloading_size", num_blocks, memory.nbytes / 2**20
        )
        limits = replace(parts.limits, num_tier_blocks=num_blocks)
        return replace(parts, limits=limits, tier_memory=memory)

    def _size_kv_cache(self, parts: Parts, groups: tuple[LayerGroup, ...]) -> KVCacheSizing:
        """The sizing for this rank, lowered to the least of all ranks, since they share block
        tables.
        """
        settings, limits = self._settings, parts.limits
        demand = KVCacheDemand(
            bytes_per_block=parts.shape.bytes_per_block,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            max_model_len_asked=settings.max_model_len is not None,
            groups=groups,
            num_steps_in_flight=max(2, self._membership.pipeline_parallel_size),
        )
        free = self._platform.free_memory(parts)
        if parts.adapters is not None and (reader := parts.loaded.lora) is not None:
            adapters = settings.num_lora_places * reader.num_bytes(settings.max_lora_rank)
            logger.info("adapters: %.1f MiB are left for them", adapters / 2**20)
            free = replace(free, activation_bytes=free.activation_bytes + adapters)
        memory = KVCacheMemory(settings.num_blocks, settings.kv_cache_memory_bytes, free)
        own = size_kv_cache(demand, memory)
        if self._group is None:
            return own
        num_blocks = self._group.smallest("num_blocks", own.num_blocks)
        max_model_len = self._group.smallest("max_model_len", own.max_model_len)
        if (num_blocks, max_model_len) == (own.num_blocks, own.max_model_len):
            return own
        why = f"{own.explanation}; lowered to {num_blocks} blocks, the least of all ranks"
        return KVCacheSizing(num_blocks, max_model_len, why)

    def _warm_runner(self, parts: Parts) -> ModelRunner:
        with memory_for("the KV cache", "lower num_blocks, kv_cache_memory_bytes or max_num_seqs"):
            runner = self._platform.runner(parts)
        with memory_for("a step", "lower max_num_batched_tokens, max_num_seqs or the KV cache"):
            shapes = self._platform.warm_up_shapes(parts.limits)
            if parts.pooler is not None and not parts.pooler.end.pooler.reads_prefix_cache:
                shapes = [shape for shape in shapes if not shape.num_computed]
            done = self._progress("warming up")
            for number, shape in enumerate(shapes):
                run_prompts(runner, parts.limits, shape)
                done(number + 1, len(shapes))
        return runner

    def _progress(self, what: str) -> Callable[[int, int], None]:
        """A function that takes the number of parts done and of all, and logs `what` with the share
        that is done: in tenths, if they take longer than _QUIET_SECONDS.
        """
        logged = time.monotonic()

        def log_progress(done: int, total: int) -> None:
            nonlocal logged
            self._checkpoint_reached()
            is_tenth = done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total
            if is_tenth and time.monotonic() >= logged + _QUIET_SECONDS:
                logged = time.monotonic()
                logger.info("%s: %d%%", what, 100 * done // total)

        return log_progress


def _prompt_pooler(loaded: LoadedModel, pooling: PoolingConfig) -> PromptPooler:
    end = vector_end(pooling, loaded.hidden_size, takes_whole_prompts=False)
    return PromptPooler(end, loaded.model.compute_logits)


def _stage(group: Group, loaded: LoadedModel) -> PipelineStage | None:
    """This rank's pipeline stage; None if there is one stage."""
    if group.link is None:
        return None
    own = group.membership
    return PipelineStage(
        own.stage, own.pipeline_parallel_size, group.link, loaded.hidden_size, loaded.dtype
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
