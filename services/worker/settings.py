"""Settings of a worker."""

from dataclasses import dataclass
from pathlib import Path

from services.common.model_source.find import find_model, model_name
from services.common.pool.kv_cache_groups import MambaCacheMode
from services.common.process.service_settings import ServiceSettings, allowed_names
from services.common.process.settings import (
    SettingError,
    at_least,
    between,
    setting,
    with_default,
)
from services.worker.backends.choices import DeviceSetting, KernelsSetting, KVCacheDtype
from services.worker.models.config import DtypeSetting
from services.worker.models.pooling_config import RunnerSetting
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.speculation.config import speculative_config_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Runs one model: weights, KV cache, attention and sampling."""

    model: Path = setting(
        doc="directory of the model in Hugging Face format, GGUF file, or name on the hub",
        read=find_model,
    )
    address: str = with_default(ServiceSettings, "address", "127.0.0.1:9003")
    internal_tls_allowed_names: tuple[str, ...] = allowed_names()
    drain_seconds: float = with_default(ServiceSettings, "drain_seconds", 1.0)
    served_model_name: str | None = setting(
        None, doc="name of the model (default: that on the hub, or the directory's)"
    )
    device: DeviceSetting = setting(
        DeviceSetting.AUTO,
        doc="device to compute on; auto is cuda if the machine has all that this needs, else cpu",
    )
    batch_invariant: bool | None = setting(
        None,
        doc="compute a request the same, bit for bit, whatever is in the batch with it (default: "
        "on the CPU yes, on CUDA no); slower with torch's kernels and on CUDA; native kernels do "
        "so in any case, at no cost",
    )
    dtype: DtypeSetting = setting(
        DtypeSetting.AUTO,
        doc="data type of weights, and of the KV cache by default; auto is the checkpoint's where "
        "the processor computes in it, else float32, and on CUDA bfloat16",
    )
    quantization: QuantizationSetting = setting(
        QuantizationSetting.AUTO,
        doc="weights of projections in memory: auto as they are stored; int8 with 8 bits and a "
        "scale for each output, quantized at load; w8a8 so, and their inputs in 8 bits when they "
        "are computed; on the CPU, for native models",
    )
    kv_cache_dtype: KVCacheDtype = setting(
        KVCacheDtype.AUTO,
        doc="what keys and values are kept as in the KV cache: auto as the model computes them; "
        "int8_per_token_head in 8 bits, with a scale for each token and key head; on the CPU",
    )
    runner: RunnerSetting = setting(
        RunnerSetting.AUTO,
        doc="what the model is run for: generate tokens, or pooling, which answers a prompt with a "
        "vector; auto is pooling for directories of sentence-transformers and architectures "
        "without the head of a language model",
    )
    block_size: int | None = setting(
        None,
        doc="tokens per block (default: 16, on CUDA 64; with recurrent layers a multiple at which "
        "a block is as large as their states)",
        check=between(1, 1024),
    )
    mamba_cache_mode: MambaCacheMode = setting(
        MambaCacheMode.ALIGN,
        doc="what recurrent layers keep of a request: align, states at ends of blocks, by which "
        "prefixes are found; none, one state, for a scheduler without prefix caching",
    )
    max_model_len: int | None = setting(
        None,
        doc="longest sequence, prompt and output together, in tokens (default: the model's, "
        "or what fits in memory)",
        check=at_least(2),
    )
    max_num_seqs: int = setting(64, doc="requests that run at once", check=between(1, 4096))
    max_num_batched_tokens: int = setting(
        1024, doc="most tokens of a step", check=between(1, 1_048_576)
    )
    num_threads: int | None = setting(
        None,
        doc="threads to compute with on the CPU (default: one for each core that the process may "
        "use, within the quota of its container; of 8 and more one less, and among workers on one "
        "machine their share)",
        check=at_least(1),
    )
    enable_lora: bool = setting(
        False, doc="serve adapters (LoRA, in PEFT's format) beside the model; native models only"
    )
    max_loras: int = setting(
        1, doc="adapters that the requests of a step may have", check=between(1, 4096)
    )
    max_lora_rank: int = setting(16, doc="highest rank of an adapter", check=between(1, 512))
    max_cpu_loras: int | None = setting(
        None, doc="adapters in memory (default: max_loras)", check=between(1, 65_536)
    )
    speculative_config: str | None = setting(
        None,
        doc="JSON: guess tokens that follow, and verify them beside the next one; with method "
        "ngram, suffix, or draft_model and model, num_speculative_tokens, num_rows, and what else "
        "the method takes, see docs/performance.md (default: no speculation)",
        check=speculative_config_problem,
    )
    kernels: KernelsSetting = setting(
        KernelsSetting.AUTO,
        doc="operations to compute with on the CPU: native ones are compiled for this processor at "
        "the first start, and kept in $XDG_CACHE_HOME/stepwell, by default ~/.cache/stepwell; auto "
        "takes torch's where that is not possible",
    )
    num_blocks: int | None = setting(
        None, doc="blocks of the KV cache, instead of its memory", check=at_least(2)
    )
    kv_cache_memory_bytes: int | None = setting(
        None, doc="memory of the KV cache, instead of a share", check=at_least(1)
    )
    kv_offloading_size: float | None = setting(
        None,
        doc="GiB of memory beside the KV cache, of all ranks together, in which published blocks "
        "are kept when the cache no longer has them; CPU workers only (default: none)",
        check=at_least(0.0001),
    )
    gpu_memory_utilization: float | None = setting(
        None,
        doc="share of memory to use: on CUDA of the GPU's, for weights, activations and KV cache "
        "(default: 0.9); on the CPU of what is available after loading, for activations and KV "
        "cache (default: 0.7)",
        check=between(0.01, 1),
    )
    num_local_replicas: int = setting(
        1,
        doc="replicas on this machine, of which each has its share of the cores and of the memory",
        check=at_least(1),
    )
    tensor_parallel_size: int | None = setting(
        None,
        doc="workers that share each layer of one model, each a rank of it (default: WORLD_SIZE by "
        "the number of pipeline stages, else 1)",
        check=between(1, 1024),
    )
    pipeline_parallel_size: int = setting(
        1,
        doc="stages that the layers of one model are divided into, each of as many workers as "
        "share a layer",
        check=between(1, 1024),
    )
    rank: int | None = setting(
        None,
        doc="number of this rank, from 0 (default: RANK, else the number at the end of HOSTNAME)",
        check=at_least(0),
    )
    master_addr: str | None = setting(
        None, doc="host where rank 0 listens for the others (default: MASTER_ADDR, else 127.0.0.1)"
    )
    master_port: int | None = setting(
        None,
        doc="port where rank 0 listens for the others (default: MASTER_PORT, else 29500)",
        check=between(1, 65_535),
    )
    join_timeout_seconds: float = setting(
        600.0, doc="time within which all ranks must have joined the group", check=at_least(1)
    )
    collective_timeout_seconds: float = setting(
        60.0, doc="longest that a rank waits for the others within a step", check=at_least(1)
    )
    check_ranks_every_steps: int = setting(
        64,
        doc="steps between two comparisons of the ranks' results; 1: after each step",
        check=at_least(1),
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.model)

    @property
    def num_lora_places(self) -> int:
        """Maximum number of LoRA adapters in memory; 0 if LoRA is not enabled. Raises SettingError
        if it is below the maximum number of adapters in one step.
        """
        most = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        if most < self.max_loras:
            raise SettingError(
                f"--max-cpu-loras must be at least --max-loras {self.max_loras}, not {most}"
            )
        return most if self.enable_lora else 0
