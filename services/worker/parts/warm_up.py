"""Builds the runner, and runs warm-up steps."""

from services.worker.backends.out_of_memory import memory_for
from services.worker.core.model_runner import ModelRunner
from services.worker.parts.progress import progress_logger
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import Parts
from services.worker.platforms.prompt_shapes import run_prompts


def warm_runner(setup: RankSetup, parts: Parts) -> ModelRunner:
    """A runner with its KV cache, after the warm-up steps. Raises NotEnoughMemory."""
    with memory_for("the KV cache", "lower num_blocks, kv_cache_memory_bytes or max_num_seqs"):
        runner = setup.platform.runner(parts)
    with memory_for("a step", "lower max_num_batched_tokens, max_num_seqs or the KV cache"):
        shapes = setup.platform.warm_up_shapes(parts.limits)
        if parts.pooler is not None and not parts.pooler.end.pooler.reads_prefix_cache:
            shapes = [shape for shape in shapes if not shape.num_computed]
        done = progress_logger("warming up", setup.checkpoint_reached)
        for number, shape in enumerate(shapes):
            run_prompts(runner, parts.limits, shape)
            done(number + 1, len(shapes))
    return runner
