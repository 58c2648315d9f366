"""Settings of a worker."""

from dataclasses import dataclass
from pathlib import Path

from services.common.model_source.find import find_model, model_name
from services.common.pool.kv_cache_groups import MambaCacheMode
from services.common.process.service_settings import ServiceSettings, allowed_names
from services.common.process.settings import SettingError, at_least, between, setting, with_default
from services.worker.backends.choices import (
    BIND_AUTO,
    DeviceSetting,
    KernelsSetting,
    KVCacheDtype,
    bind_problem,
)
from services.worker.models.config import DtypeSetting
from services.worker.models.pooling_config import RunnerSetting
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.speculation.config import speculative_config_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """A worker of one model: weights, KV cache, attention and sampling."""

    model: Path = setting(
        doc="directory of the model in Hugging Face format, GGUF file, or name on the hub",
        read=find_model,
    )
    address: str = with_default(ServiceSettings, "address", "127.0.0.1:9003")
    internal_tls_allowed_names: tuple[str, ...] = allowed_names()
    drain_seconds: float = with_default(ServiceSettings, "drain_seconds", 1.0)
    served_model_name: str | None = setting(
        None,
        doc="name under which the model is served (default: its name on the hub, or the "
        "directory's name)",
    )
    device: DeviceSetting = setting(
        DeviceSetting.AUTO,
        doc="device to compute on; auto: cuda if the machine and the settings meet its "
        "requirements, otherwise cpu; simulated: no device, see docs/simulated-device.md",
    )
    profile: str | None = setting(
        None,
        doc="step times and memory of device simulated: the name of a profile, or a TOML file",
    )
    device_faults: str | None = setting(
        None,
        doc="faults of device simulated, such as 'after 30 s: hang 5 s', or a file of faults, see "
        "docs/simulated-device.md",
    )
    batch_invariant: bool | None = setting(
        None,
        doc="compute bit-identical results for a request in every batch (default: on the CPU yes, "
        "on CUDA no). Native kernels always do; kernels of torch and CUDA become slower",
    )
    dtype: DtypeSetting = setting(
        DtypeSetting.AUTO,
        doc="data type of weights, and by default of the KV cache; auto: on CUDA bfloat16; on the "
        "CPU as in the checkpoint if the processor supports it, otherwise float32",
    )
    quantization: QuantizationSetting = setting(
        QuantizationSetting.AUTO,
        doc="format of projections in memory: auto: as stored in the checkpoint; int8: weights "
        "are quantized at load, with one scale per output; w8a8: inputs are also quantized to 8 "
        "bits. CPU and native models only",
    )
    kv_cache_dtype: KVCacheDtype = setting(
        KVCacheDtype.AUTO,
        doc="format of keys and values in the KV cache: auto: as computed; int8_per_token_head: 8 "
        "bits, with one scale per token and key head (CPU only)",
    )
    runner: RunnerSetting = setting(
        RunnerSetting.AUTO,
        doc="use of the model: generate, or pooling, which returns vectors; auto: pooling for "
        "directories of sentence-transformers and architectures without a language model's head",
    )
    block_size: int | None = setting(
        None,
        doc="tokens per block (default: 16, on CUDA 64; with recurrent layers a multiple that is "
        "large enough for their states)",
        check=between(1, 1024),
    )
    mamba_cache_mode: MambaCacheMode = setting(
        MambaCacheMode.ALIGN,
        doc="states of recurrent layers that are stored: align: at the ends of blocks, for prefix "
        "hits; none: one state per request, for a scheduler without prefix caching",
    )
    max_model_len: int | None = setting(
        None,
        doc="maximum length of a sequence, prompt and output together, in tokens (default: the "
        "model's maximum, or what fits into memory)",
        check=at_least(2),
    )
    max_num_seqs: int = setting(
        64, doc="maximum number of requests that run at once", check=between(1, 4096)
    )
    max_num_batched_tokens: int = setting(
        1024, doc="maximum number of tokens in a step", check=between(1, 1_048_576)
    )
    num_threads: int | None = setting(
        None,
        doc="number of threads on the CPU (default: one per available core, at most the CPU "
        "quota, rounded up; one less if that is 8 or more; divided among the workers of the "
        "machine)",
        check=at_least(1),
    )
    cpu_omp_threads_bind: str = setting(
        BIND_AUTO,
        doc="processors to which the threads are bound: auto: the cores of one NUMA node, if the "
        "machine has several; nobind: none; or one list for each local worker, such as 0-31|32-63",
        check=bind_problem,
    )
    enable_lora: bool = setting(
        False, doc="serve LoRA adapters in PEFT's format beside the model; native models only"
    )
    max_loras: int = setting(
        1, doc="maximum number of different LoRA adapters in a step", check=between(1, 4096)
    )
    max_lora_rank: int = setting(16, doc="maximum rank of a LoRA adapter", check=between(1, 512))
    max_cpu_loras: int | None = setting(
        None,
        doc="maximum number of LoRA adapters in memory (default: max_loras)",
        check=between(1, 65_536),
    )
    speculative_config: str | None = setting(
        None,
        doc="JSON: speculative decoding with method ngram, suffix or draft_model, see "
        "docs/performance.md (default: none)",
        check=speculative_config_problem,
    )
    kernels: KernelsSetting = setting(
        KernelsSetting.AUTO,
        doc="kernels on the CPU: native: compiled at the first start and stored in "
        "$XDG_CACHE_HOME/stepwell (~/.cache/stepwell); torch; auto: native if possible, otherwise "
        "torch",
    )
    num_blocks: int | None = setting(
        None,
        doc="number of blocks of the KV cache (default: computed from its memory)",
        check=at_least(2),
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        doc="memory of the KV cache in bytes (default: computed from gpu_memory_utilization)",
        check=at_least(1),
    )
    kv_offloading_size: float | None = setting(
        None,
        doc="GiB of memory in addition to the KV cache, of all ranks together, to which blocks "
        "that the cache evicts are offloaded; CPU only (default: none)",
        check=at_least(0.0001),
    )
    gpu_memory_utilization: float | None = setting(
        None,
        doc="fraction of memory to use: on CUDA of the GPU's memory (default: 0.9); on the CPU of "
        "the memory that is available after loading (default: 0.7)",
        check=between(0.01, 1),
    )
    num_local_replicas: int = setting(
        1, doc="number of replicas that share this machine's cores and memory", check=at_least(1)
    )
    local_replica: int = setting(
        0, doc="number of this replica among the local replicas, from 0", check=at_least(0)
    )
    tensor_parallel_size: int | None = setting(
        None,
        doc="number of ranks that divide each layer (default: WORLD_SIZE divided by the number of "
        "pipeline stages, otherwise 1)",
        check=between(1, 1024),
    )
    pipeline_parallel_size: int = setting(
        1,
        doc="number of pipeline stages that divide the layers, each of tensor_parallel_size ranks",
        check=between(1, 1024),
    )
    rank: int | None = setting(
        None,
        doc="number of this worker's rank, from 0 (default: RANK, otherwise the number at the end "
        "of HOSTNAME)",
        check=at_least(0),
    )
    master_addr: str | None = setting(
        None,
        doc="host where rank 0 listens for the other ranks (default: MASTER_ADDR, otherwise "
        "127.0.0.1)",
    )
    master_port: int | None = setting(
        None,
        doc="port where rank 0 listens for the other ranks (default: MASTER_PORT, otherwise 29500)",
        check=between(1, 65_535),
    )
    join_timeout_seconds: float = setting(
        600.0, doc="time limit, in seconds, for all ranks to join", check=at_least(1)
    )
    collective_timeout_seconds: float = setting(
        60.0,
        doc="longest time, in seconds, that a rank waits for the other ranks within a step",
        check=at_least(1),
    )
    check_ranks_every_steps: int = setting(
        64, doc="number of steps between two comparisons of the ranks' results", check=at_least(1)
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.model)

    @property
    def num_lora_slots(self) -> int:
        """The maximum number of LoRA adapters in memory, 0 if LoRA is not enabled. Raises
        SettingError if this maximum is below the maximum number of adapters in one step.
        """
        most = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        if most < self.max_loras:
            raise SettingError(
                f"--max-cpu-loras must be at least --max-loras {self.max_loras}, not {most}"
            )
        return most if self.enable_lora else 0
