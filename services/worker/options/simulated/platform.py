"""The simulated device as a Platform."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from services.common.process.settings import SettingError
from services.worker.backends.attention import CPU, AttentionShape
from services.worker.backends.choices import DeviceSetting
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.backends.ranks import Ranks
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.models.config import DtypeSetting, read_architecture, read_model_config
from services.worker.models.decoder import attention_layers
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.load import native_max_model_len, without_idle_windows
from services.worker.models.lora.reader import LoraReader
from services.worker.models.model import LoadedModel, LoadOptions, log_loading, resolve_dtype
from services.worker.models.rope import RopeType
from services.worker.models.shard import Shard, check_stages
from services.worker.models.stage import StageLayers
from services.worker.models.suitability.check import is_native, takes_whole_prompts
from services.worker.models.weights import Progress
from services.worker.options.simulated.device import SimulatedDevice
from services.worker.options.simulated.faults import Faults, Rule, read_rules
from services.worker.options.simulated.kernels import SimulatedKernels
from services.worker.options.simulated.model import SimulatedModel
from services.worker.options.simulated.model_size import Sizes
from services.worker.options.simulated.runner import TimedModel, TimedRunner
from services.worker.parallel.group import Group
from services.worker.platform_choice import select_platform
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.cpu_kernels import select_kernels
from services.worker.platforms.interface import Platform, RunnerParts
from services.worker.platforms.prompt_shapes import PromptShape
from services.worker.profiles.profile import Profile, read_profile
from services.worker.settings import WorkerSettings


def select_simulated(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Platform:
    """Selects the simulated device if the settings name it, otherwise a real platform (see
    `select_platform`). For the simulated device, raises SettingError if the profile or the script
    of faults is missing or invalid, and KernelsUnavailable if the settings require compiled
    kernels, for sampling, and there are none.
    """
    if settings.device is not DeviceSetting.SIMULATED:
        for name, value in (
            ("profile", settings.profile),
            ("device-faults", settings.device_faults),
        ):
            if value is not None:
                raise SettingError(f"--{name} needs --device simulated")
        return select_platform(settings, checkpoint_reached, group)
    profile = read_profile(settings.profile)
    kernels = select_kernels(settings.kernels, default_cache_directory(), checkpoint_reached)
    simulated = SimulatedKernels(Path(str(settings.profile)).stem, kernels.row_sampler())
    rank = 0 if group is None else group.membership.rank
    rules = read_rules(settings.device_faults or "", rank, settings.local_replica)
    return SimulatedPlatform(profile, simulated, settings.gpu_memory_utilization, rules)


class SimulatedPlatform:
    """A Platform without weights. A step computes hashes on the CPU from the contents of the KV
    cache, and takes the time that the profile predicts.
    """

    torch_device = CPU
    default_block_size = CpuPlatform.default_block_size
    has_tier = True
    has_draft_models = True
    scales_blocks = True
    num_speculative_rows = 0

    def __init__(
        self,
        profile: Profile,
        kernels: SimulatedKernels,
        memory_utilization: float | None = None,
        rules: Sequence[Rule] = (),
    ) -> None:
        self._profile = profile
        self._kernels = kernels
        self._memory_utilization = memory_utilization
        self._host = CpuPlatform(kernels, memory_utilization)
        self._device = SimulatedDevice()
        self._faults = Faults(rules, self._device)

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        return asked

    def kernels(self) -> SimulatedKernels:
        return self._kernels

    def open(self, directory: Path) -> Checkpoint:
        """Returns a checkpoint without tensors. Raises UnsupportedModel if the architecture has no
        native implementation, because the shape of the KV cache is then unknown.
        """
        name = read_architecture(directory)
        if not is_native(name, pools=True) or takes_whole_prompts(directory):
            problem = (
                f"device simulated needs a native decoder, which architecture {name} does not have"
            )
            raise UnsupportedModel(directory / "config.json", problem)
        return Checkpoint(directory, {})

    def load(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        progress: Progress,
        ranks: Ranks,
        wait_for_ranks: Callable[[], None],
    ) -> LoadedModel:
        """Returns a SimulatedModel with the shapes that config.json describes. Each rank has the
        whole model, but a KV cache only for its part of the model. Raises UnsupportedModel if there
        are more stages than layers.
        """
        directory, pooling = checkpoint.directory, options.pooling
        config = read_model_config(directory)
        max_model_len = native_max_model_len(config, options, directory / "config.json")
        dtype = resolve_dtype(options.dtype, config.checkpoint_dtype, has_bfloat16=True)
        log_loading(f"the configuration of {config.architecture.value}", directory, dtype)
        attention = attention_layers(Shard(ranks.rank, ranks.size).config(config))
        check_stages(config.num_layers, options.num_stages, directory)
        sizes = Sizes(config, dtype, options.quantization)
        stage = sizes.stage(options.stage, options.num_stages)
        model = SimulatedModel(
            sizes.model_size(attention, stage, ranks.size),
            config.eos_token_ids,
            self._profile.mean_output_tokens,
            pools=pooling is not None,
            num_labels=0 if pooling is None else pooling.num_labels,
            dtype=dtype,
            receives=not stage.is_first,
            sends=not stage.is_last,
        )
        every_layer = StageLayers(0, config.num_layers, config.num_layers)
        return without_idle_windows(
            LoadedModel(
                model=model,
                architecture=config.architecture.value,
                dtype=dtype,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                max_model_len=max_model_len,
                eos_token_ids=config.eos_token_ids,
                attention=attention,
                rope_length=max_model_len if config.rope.rope_type is RopeType.DYNAMIC else 0,
                stage=None if stage.is_whole else stage,
                lora=LoraReader(config, Shard(), every_layer, dtype, self._kernels),
            )
        )

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Accepts every model that is loaded."""

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        size = _model(parts.loaded).size
        if parts.draft_model is not None:
            draft_bytes = _model(parts.draft_model.loaded).size.weight_bytes
            size = replace(size, weight_bytes=size.weight_bytes + draft_bytes)
        return self._profile.free_memory(size, parts.limits, self._memory_utilization)

    def stored_block_bytes(self, parts: RunnerParts) -> int:
        shapes = [parts.shape, *([] if parts.draft_model is None else [parts.draft_model.shape])]
        return sum(2 * 8 * max(shape.block_sizes) for shape in shapes)

    def runner(self, parts: RunnerParts) -> TimedRunner:
        """Creates a runner. Its KV caches have one layer for each KV-cache group of the whole
        model, so that the caches of all pipeline stages and of the draft model return the same
        sums.
        """
        model, draft, profile = _model(parts.loaded), parts.draft_model, self._profile
        stage, times = parts.stage, profile.step_times(model.size)
        self._faults.at_start()
        timed = TimedModel(
            *(model, times, self._device),
            receives=not (stage is None or stage.is_first),
            sends=not (stage is None or stage.is_last),
            faults=self._faults if self._faults.rules else None,
        )
        first = parts.loaded.attention[0]
        layers = tuple(replace(first, window=window) for window in parts.limits.windows)
        each = tuple((index,) for index in range(len(layers)))
        if draft is not None:
            times = profile.draft_times(_model(draft.loaded).size)
            drafting = model.draft_model(profile.draft_acceptance_rate)
            draft = replace(
                draft,
                loaded=replace(draft.loaded, model=TimedModel(drafting, times, self._device)),
                shape=replace(draft.shape, layers=layers, groups=()),
            )
        parts = replace(
            parts,
            loaded=replace(parts.loaded, model=timed),
            shape=replace(parts.shape, layers=layers, groups=each),
            draft_model=draft,
        )
        return TimedRunner(self._host.runner(parts), self._device)

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """Returns no shapes, because nothing is compiled."""
        return []


def _model(loaded: LoadedModel) -> SimulatedModel:
    if not isinstance(loaded.model, SimulatedModel):
        raise AssertionError("the simulated device loads simulated models")
    return loaded.model
