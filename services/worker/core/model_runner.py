"""The model runner: applies the changes that a step brings to the batch, and computes its tokens.

1. The changes are applied to the batch, which is kept from step to step. A request's index in the
   batch is its row.
2. Requests are put in the order that attention needs: requests with a single token by length, then
   chunks.
3. The model runs once over all scheduled tokens.
4. Logits are computed only for positions that are sampled or that need prompt log-probabilities.
5. Sampled tokens are appended to the batch, so that the scheduler need not send them with the next
   step (see `step_sampler`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.attention import PagedAttention
from services.worker.backends.device import CpuDevice, Device
from services.worker.backends.hybrid_cache import HybridCache
from services.worker.backends.lora import PackedLora
from services.worker.backends.row_sampler import RowSampler
from services.worker.core.batch.device_tokens import DeviceTokens
from services.worker.core.batch.embedded_prompts import EmbeddedPrompts
from services.worker.core.batch.input_batch import BatchLimits, InputBatch
from services.worker.core.batch.layout import StepTokens, lay_out
from services.worker.core.batch.lora_adapters import LoraAdapters, find_adapters, lora_rows
from services.worker.core.batch.step_difference import apply_step
from services.worker.core.decode_buckets import DecodeBuckets
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.errors import DeviceFailed, InvalidStep
from services.worker.core.kv.kv_cache import Tier
from services.worker.core.lockstep import Lockstep
from services.worker.core.pipeline import PipelineStage
from services.worker.core.pooler import PromptPooler
from services.worker.core.sampled import PendingOutput, Sampled
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.step_sampler import StepSampler
from services.worker.models.model import Model, ModelInput, wanted_rows
from services.worker.sampling.grammar import Grammars

_WITHOUT_ADAPTER = -1
"""Replaces a step's digest in the exchange between ranks if this rank lacks an adapter of the step.
Ranks that have the adapter report another digest, so that no rank begins the step.
"""


@dataclass(eq=False)
class ModelRunner:
    """Runs steps one after the other with one model, KV cache and batch. Not thread-safe."""

    model: Model
    attention: PagedAttention
    limits: BatchLimits
    device: Device = field(default_factory=CpuDevice)
    device_tokens: DeviceTokens | None = None
    """Stores sampled tokens on the device, so that `begin` does not wait. None on the CPU."""
    buckets: DecodeBuckets | None = None
    """Replays recorded decode-only steps. None if they are not recorded."""
    lockstep: Lockstep | None = None
    """Runs each step together with the other ranks. None if there are none."""
    pooler: PromptPooler | None = None
    """Pools prompts. If it is set, no tokens are sampled."""
    states: HybridCache | None = None
    """Copies the states of recurrent layers between blocks. None without such layers."""
    stage: PipelineStage | None = None
    """This rank's pipeline stage, if any. Then `model` is a StagedModel with the stage's layers."""
    tier: Tier | None = None
    """The tier of host memory to which KV blocks are offloaded."""
    grammars: Grammars | None = None
    adapters: LoraAdapters | None = None
    drafter: Drafter | None = None
    """Proposes drafts. If it is None, only drafts that the scheduler sends are verified."""
    row_sampler: RowSampler | None = None
    """Draws tokens. If it is None, NumPy draws them."""

    def __post_init__(self) -> None:
        stage, self._batch = self.stage, InputBatch(self.limits)
        self._samples = self.pooler is None and (stage is None or stage.is_last)
        self._embedded = EmbeddedPrompts(self.model if stage is None or stage.is_first else None)
        self._adapter_of: dict[int, PackedLora] = {}
        """Maps rows of the batch to LoRA adapters. Requests without an adapter are absent."""
        self._sampler = StepSampler(
            self._batch, self.device, self.device_tokens, self.grammars, self.row_sampler
        )
        self._generation: int | None = None

    def reset(self) -> None:
        self._batch.clear()
        self._adapter_of.clear()
        self._embedded.clear()
        if self.pooler is not None:
            self.pooler.clear()
        if self.device_tokens is not None:
            self.device_tokens.reset()
        if self.drafter is not None:
            self.drafter.clear()
        if self.tier is not None:
            self.tier.reset()
        self._sampler.clear()

    def execute(self, step: StepInput) -> StepOutput:
        """Runs a step and waits for its output. Raises the same errors as `begin`."""
        output = self.begin(step)
        return output if isinstance(output, StepOutput) else output.wait()

    @torch.inference_mode()
    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs a step. If a device samples its tokens, queues the step there and returns at once.

        Raises InvalidArgument for an invalid step, which leaves the batch unchanged. Also raises
        the errors of Lockstep.
        """
        begin = self._begin if self.stage is None else self._begin_stage
        if self.tier is not None:
            begin = partial(self._begin_with, self.tier, begin)
        if self.lockstep is None:
            return begin(step)
        if self.adapters is not None and self.adapters.lacks_any(step):
            step.digest = _WITHOUT_ADAPTER
        return self.lockstep.run(step, begin)

    def _begin_with(
        self, tier: Tier, begin: Callable[[StepInput], StepOutput | PendingOutput], step: StepInput
    ) -> StepOutput | PendingOutput:
        """Runs a step with `begin`, and adds the ended loads from the tier to its output."""
        output = begin(step)
        ended = tier.take_ended(is_idle=not len(step.rows))
        if ended and isinstance(output, StepOutput):
            return replace(output, ended_tier_loads=ended)
        return output

    def _begin_stage(self, step: StepInput) -> StepOutput | PendingOutput:
        stage = self.stage
        if stage is None:
            raise AssertionError("the model is not a pipeline stage")
        if len(step.draft_token_ids):
            problem = "drafts are not verified by pipeline stages"
            raise InvalidStep.in_field(step.step, "num_draft_tokens", problem)
        stage.begin(step)
        output = self._begin(step)
        if not len(step.rows):
            stage.skip()
        elif isinstance(output, StepOutput):
            output = replace(output, waited_nanos=stage.waited_nanos)
        return output

    def _wait_for_device(self) -> None:
        """Waits until the device has done all earlier work. Called when the scheduler has opened
        the KV pool again, so that a hanging device is detected before new requests are sent to it.
        Raises DeviceFailed if the device cannot even copy a number.
        """
        try:
            self.device.download(self.device.upload(np.zeros(1, np.int32))).wait()
        except RuntimeError as error:
            line = (str(error).splitlines() or [""])[0]
            raise DeviceFailed(f"the device computes nothing any more: {line}") from error

    def _begin(self, step: StepInput) -> StepOutput | PendingOutput:
        if step.generation != self._generation:
            self.reset()
            self._wait_for_device()
            self._generation = step.generation
        num_computed_tokens = self._update_batch(step)
        self._prepare_blocks(step)
        if not len(step.rows):
            empty = np.empty(0, np.int32)
            return StepOutput(step.generation, step.step, empty, empty)
        if self.drafter is not None:
            step = self.drafter.complete(
                step, num_computed_tokens, self._batch, self._sampler.forced_tokens
            )
        self._batch.place_drafts(step)
        if self.stage is not None and not self._samples:
            self._batch.place_last_tokens(step)
        tokens = lay_out(step, self._batch)
        num_tokens = self._batch.num_tokens[tokens.rows]
        token_ids = self.device.upload(tokens.token_ids)
        if self.pooler is not None:
            hidden, _ = self._run_model(tokens, token_ids, None, token_ids[:0])
            return self.pooler.pool(step, tokens, num_tokens, hidden)
        sampling = tokens.sampling(num_tokens)
        if self.device_tokens is not None:
            self.device_tokens.fill_in(token_ids, step, tokens, num_tokens)
        logits, logits_of = self._forward(tokens, token_ids, sampling.logits_indices)
        if not self._samples:
            self._batch.append_unknown(tokens.rows[sampling.requests])
            return Sampled().output(step, {})
        output = self._sampler.sample(step, tokens, sampling, logits, logits_of)
        if self.drafter is not None:
            self.drafter.sampled(tokens, self._batch)
        return output

    def _prepare_blocks(self, step: StepInput) -> None:
        """Before the step computes: stores, clears and copies blocks, and begins loads."""
        if self.tier is not None and step.tier_stores is not None:
            self.tier.store(step.tier_stores)
        if len(step.block_ids_to_zero):
            self.attention.zero_blocks(step.block_ids_to_zero)
        if self.states is not None:
            self.states.copy_blocks(step.copy_sources, step.copy_targets)
        if self.tier is not None and step.tier_loads:
            self.tier.begin_loads(step.tier_loads)

    def _update_batch(self, step: StepInput) -> Int32Array:
        if self.pooler is not None:
            self.pooler.check(step)
        if not (len(step.removed_rows) or step.new_requests):
            return apply_step(self._batch, step)
        embedded = self._embedded.read(step, self.device)
        entering = find_adapters(step, {}) if self.adapters is None else self.adapters.of_step(step)
        num_computed_tokens = apply_step(self._batch, step)
        self._embedded.replace(step, embedded)
        if self._adapter_of:
            for row in step.removed_rows.tolist():
                self._adapter_of.pop(row, None)
        self._adapter_of.update(entering)
        if self.pooler is not None:
            self.pooler.update(step)
        if not self._samples:
            return num_computed_tokens
        if self.drafter is not None:
            self.drafter.update(step)
        self._sampler.update(step)
        return num_computed_tokens

    def _forward(
        self, tokens: StepTokens, token_ids: torch.Tensor, logits_indices: Int64Array
    ) -> tuple[torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor]]:
        """Runs the model over the step's tokens. Returns their logits at `logits_indices`, float32
        [n, vocab_size], or None if there are no indices, and a function that computes logits at
        other indices.
        """
        embedded = self._embedded.of_step(tokens, token_ids)
        is_all = len(logits_indices) == len(tokens.token_ids)
        wanted = None if is_all else self.device.upload(logits_indices)
        if (
            self.buckets is not None
            and embedded is None
            and tokens.layouts[0].only_decodes
            and not self._adapter_of
        ):
            logits = self.buckets.logits(token_ids, tokens.positions, tokens.layouts)
            return wanted_rows(logits, wanted), lambda some: logits[some]
        hidden, found = self._run_model(tokens, token_ids, embedded, wanted)
        return found, lambda some: self.model.compute_logits(hidden[some])

    def _run_model(
        self,
        tokens: StepTokens,
        token_ids: torch.Tensor,
        embedded: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        lora = None
        if self._adapter_of:
            lora = lora_rows(tokens, self._adapter_of, self.device)
        positions = self.device.upload(tokens.positions)
        attention = self.attention.begin_step(tokens.layouts)
        given = ModelInput(token_ids, positions, attention, embedded, wanted, lora)
        hidden, logits = self.model.forward(given)
        if self.lockstep is not None:
            self.lockstep.add_hidden_states(hidden)
        return hidden, logits
