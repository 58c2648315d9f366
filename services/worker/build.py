"""Builds a worker from its settings: loads the model, sizes the KV cache, runs warm-up steps."""

import gc
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.common.process.processors import usable_processors
from services.worker.backends.device import dtype_name
from services.worker.backends.out_of_memory import memory_for
from services.worker.backends.ranks import Ranks
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.worker import StepRunner, Worker
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.pooling_config import PoolingConfig, read_pooling
from services.worker.models.suitability.check import takes_whole_prompts
from services.worker.options.listed import PLATFORM, TIER
from services.worker.parallel.group import Group
from services.worker.parts.description import describe
from services.worker.parts.drafter import with_drafter
from services.worker.parts.kv_cache import make_adapters, size_rank_kv_cache
from services.worker.parts.model import load_parts
from services.worker.parts.rank_setup import RankSetup, set_up_rank, with_group
from services.worker.parts.refusals import refuse_for_whole_prompts
from services.worker.platform_choice import local_worker, threads_bind
from services.worker.platforms.interface import RunnerParts
from services.worker.platforms.placement import bind_and_set, place_threads
from services.worker.platforms.prompt_shapes import run_prompts
from services.worker.sampling.grammar import Grammars, model_compiler
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


def load_worker(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Worker:
    """Sets torch's number of threads, then builds a worker as `build_worker` does. If threads are
    to be bound to processors, binds the calling thread, from which new threads inherit the binding.
    Raises SettingError if the settings name processors that this process may not use.
    """
    threads = place_threads(
        usable_processors(),
        local_worker(settings, group),
        settings.num_threads,
        threads_bind(settings),
    )
    bind_and_set(threads)
    began = time.monotonic()
    worker = build_worker(settings, uuid.uuid4().hex, checkpoint_reached, group)
    # Loaded objects are never freed. Frozen objects do not slow down full garbage collections.
    gc.collect()
    gc.freeze()
    took = time.monotonic() - began
    logger.info(
        "the model is loaded and warmed up after %.1f s, and computes with %s", took, threads
    )
    return worker


def build_worker(
    settings: WorkerSettings,
    incarnation: str,
    checkpoint_reached: Callable[[], None],
    group: Group | None = None,
) -> Worker:
    """Loads the model and runs warm-up steps. Must be called in the thread that will compute.
    `group` is the worker's group of ranks, or None for a single worker.

    `checkpoint_reached` is called many times during startup, and may raise to abort it. Raises
    ModelError if the model directory cannot be served, KVCacheTooSmall or NotEnoughMemory if memory
    is too small, and GroupBroken if the ranks have different models or settings. Settings that this
    model, machine or device does not support raise NoSpeculation, NoTier, UnsuitableDevice,
    KernelsUnavailable or SettingError.
    """
    setup = set_up_rank(settings, checkpoint_reached, group, PLATFORM)
    checkpoint = setup.platform.open(settings.model)
    pooling = read_pooling(settings.model, settings.runner)
    if pooling is None or not takes_whole_prompts(settings.model):
        return _build_cached(setup, checkpoint, pooling, incarnation)
    refuse_for_whole_prompts(setup)
    # Imported only for models that need it, because it imports transformers, which takes seconds
    # and a hundred megabytes.
    from services.worker.parts.whole import build_whole  # noqa: PLC0415

    return build_whole(setup, checkpoint, pooling, incarnation)


def _build_cached(
    setup: RankSetup, checkpoint: Checkpoint, pooling: PoolingConfig | None, incarnation: str
) -> Worker:
    settings = setup.settings
    parts, groups = load_parts(setup, checkpoint, pooling)
    loaded, block_size = parts.loaded, parts.shape.block_size
    setup.platform.check(parts.shape, loaded)
    parts = with_drafter(setup, parts)
    fingerprint = model_fingerprint(
        *(checkpoint, block_size, dtype_name(loaded.dtype), loaded.rope_length, groups, pooling),
        settings.quantization,
        b"" if parts.draft_model is None else parts.draft_model.fingerprint,
        settings.kv_cache_dtype,
        bfloat16_order=parts.kernels.bfloat16_order,
    )
    parts = TIER(setup, with_group(setup, parts, fingerprint))
    adapters = make_adapters(setup, loaded)
    grammars = make_grammars(settings.model, parts, setup.ranks)
    parts = replace(parts, grammars=grammars, adapters=adapters)
    sizing = size_rank_kv_cache(setup, parts, groups)
    for line in sizing.explanation.split("; "):
        logger.info("KV cache: %s", line)
    parts = parts.sized(sizing.num_blocks, sizing.max_model_len)
    description = describe(setup, parts, groups, sizing, fingerprint, incarnation)
    return Worker(warm_runner(setup, parts), description, parts.grammars, adapters)


def make_grammars(model: Path, parts: RunnerParts, ranks: Ranks) -> Grammars | None:
    """Returns the compiler of the grammars that constrain outputs, or None if this rank samples no
    tokens. `model` is the directory with the tokenizer. `ranks` are the ranks of this stage.
    """
    if parts.pooler is not None or not (parts.stage is None or parts.stage.is_last):
        return None
    loaded = parts.loaded
    compiler = partial(model_compiler, model, loaded.vocab_size, loaded.eos_token_ids)
    return Grammars(compiler, ranks)


def warm_runner(setup: RankSetup, parts: RunnerParts) -> StepRunner:
    """Creates the runner with its KV cache, and runs warm-up steps. Raises NotEnoughMemory."""
    with memory_for("the KV cache", "lower num_blocks, kv_cache_memory_bytes or max_num_seqs"):
        runner = setup.platform.runner(parts)
    with memory_for("a step", "lower max_num_batched_tokens, max_num_seqs or the KV cache"):
        shapes = setup.platform.warm_up_shapes(parts.limits)
        if parts.pooler is not None and not parts.pooler.end.pooler.reads_prefix_cache:
            shapes = [shape for shape in shapes if not shape.num_computed]
        done = setup.progress("warming up")
        for number, shape in enumerate(shapes):
            run_prompts(runner, parts.limits, shape)
            done(number + 1, len(shapes))
    return runner
