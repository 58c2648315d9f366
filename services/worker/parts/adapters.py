from pathlib import Path

from services.common.errors import InvalidArgument
from services.worker.backends.lora import PackedLora
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.models.errors import ModelError, UnsupportedModel
from services.worker.models.model import LoadedModel
from services.worker.parts.rank_setup import RankSetup


def make_adapters(setup: RankSetup, loaded: LoadedModel) -> LoraAdapters | None:
    """The storage of adapters, or None if LoRA is not enabled. Raises UnsupportedModel if LoRA is
    enabled and the model does not support it.
    """
    settings, device = setup.settings, setup.platform.torch_device
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


def adapter_bytes(setup: RankSetup, loaded: LoadedModel) -> int:
    settings, reader = setup.settings, loaded.lora
    if reader is None or not settings.num_lora_places:
        return 0
    return settings.num_lora_places * reader.num_bytes(settings.max_lora_rank)
