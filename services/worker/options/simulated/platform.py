"""The Platform of the simulated device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.common.process.settings import SettingError
from services.worker.backends.attention import CPU, AttentionShape
from services.worker.backends.choices import DeviceSetting
from services.worker.backends.device import UnsuitableDevice
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
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.rope import RopeType
from services.worker.models.shard import Shard
from services.worker.models.stage import StageLayers
from services.worker.models.suitability.check import is_native, takes_whole_prompts
from services.worker.models.weights import Progress
from services.worker.options.simulated.cache import SimulatedCache
from services.worker.options.simulated.kernels import SimulatedKernels
from services.worker.options.simulated.model import SimulatedModel
from services.worker.options.simulated.model_size import ModelSize, model_size
from services.worker.options.simulated.profile import Profile, read_profile
from services.worker.options.simulated.runner import TimedRunner
from services.worker.parallel.group import Group
from services.worker.platform_choice import select_platform
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.cpu_kernels import select_kernels
from services.worker.platforms.interface import Platform, RunnerParts
from services.worker.platforms.prompt_shapes import PromptShape
from services.worker.settings import WorkerSettings


def select_simulated(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Platform:
    """A SelectPlatform that also selects the simulated device. Raises SettingError for a missing or
    unusable profile, and UnsuitableDevice for settings that are not simulated.
    """
    if settings.device is not DeviceSetting.SIMULATED:
        if settings.profile is not None:
            raise SettingError("--profile belongs to --device simulated")
        return select_platform(settings, checkpoint_reached, group)
    profile = read_profile(settings.profile)
    if settings.pipeline_parallel_size > 1:
        raise _not_simulated("pipeline stages are", "--pipeline-parallel-size 1")
    if settings.quantization is not QuantizationSetting.AUTO:
        raise _not_simulated("quantization at load is", "--quantization auto")
    kernels = select_kernels(settings.kernels, default_cache_directory(), checkpoint_reached)
    simulated = SimulatedKernels(Path(str(settings.profile)).stem, kernels.row_sampler())
    return SimulatedPlatform(profile, simulated, settings.gpu_memory_utilization)


class SimulatedPlatform:
    """A Platform without a model. A step computes on the CPU what it reads from the cache, and
    takes the time that the profile says.
    """

    torch_device = CPU
    default_block_size = CpuPlatform.default_block_size
    has_tier = True
    has_draft_models = False
    scales_blocks = True
    num_speculative_rows = 0

    def __init__(
        self, profile: Profile, kernels: SimulatedKernels, memory_utilization: float | None = None
    ) -> None:
        self._profile = profile
        self._kernels = kernels
        self._memory_utilization = memory_utilization
        self._host = CpuPlatform(kernels, memory_utilization)

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        return asked

    def kernels(self) -> SimulatedKernels:
        return self._kernels

    def open(self, directory: Path) -> Checkpoint:
        """A checkpoint without tensors. Raises UnsupportedModel if the architecture is not native,
        since then only its code knows the shape of the cache.
        """
        name = read_architecture(directory)
        if not is_native(name, pools=True) or takes_whole_prompts(directory):
            problem = f"device simulated: architecture {name} has no native decoder"
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
        """A SimulatedModel with the shapes that config.json describes. Each rank has the whole
        model, and its part of the cache's memory.
        """
        directory, pooling = checkpoint.directory, options.pooling
        config = read_model_config(directory)
        max_model_len = native_max_model_len(config, options, directory / "config.json")
        dtype = resolve_dtype(options.dtype, config.checkpoint_dtype, has_bfloat16=True)
        log_loading(f"the configuration of {config.architecture.value}", directory, dtype)
        attention = attention_layers(Shard(ranks.rank, ranks.size).config(config))
        model = SimulatedModel(
            model_size(config, attention, dtype, ranks.size),
            config.eos_token_ids,
            self._profile.mean_output_tokens,
            pools=pooling is not None,
            num_labels=0 if pooling is None else pooling.num_labels,
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
                lora=LoraReader(config, Shard(), every_layer, dtype, self._kernels),
            )
        )

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Accepts every model that is loaded."""

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        size = _size(parts)
        return self._profile.free_memory(size, parts.limits, self._memory_utilization)

    def stored_block_bytes(self, parts: RunnerParts) -> int:
        return SimulatedCache(replace(parts.shape, num_blocks=1)).planes.nbytes

    def runner(self, parts: RunnerParts) -> TimedRunner:
        return TimedRunner(self._host.runner(parts), self._profile.step_times(_size(parts)))

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """None, since nothing is compiled."""
        return []


def _size(parts: RunnerParts) -> ModelSize:
    model = parts.loaded.model
    if not isinstance(model, SimulatedModel):
        raise AssertionError("the simulated device loads simulated models")
    return model.size


def _not_simulated(what: str, remedy: str) -> UnsuitableDevice:
    return UnsuitableDevice(f"device simulated: {what} not simulated; set {remedy}")
