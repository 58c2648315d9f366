"""The LoRA adapters in a worker's memory. An adapter is identified by the digest of its files."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from services.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from services.common.request.adapter import adapter_digest
from services.worker.backends.device import Device
from services.worker.backends.lora import LoraRows, PackedLora
from services.worker.core.batch.layout import StepTokens
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput


class LoraAdapters:
    """Stores at most `max_cpu_loras` adapters in memory. The scheduler decides which adapters are
    loaded. A dropped adapter is freed when no request of the batch uses it any more.
    """

    def __init__(self, read: Callable[[Path], PackedLora], max_cpu_loras: int) -> None:
        """`read` loads an adapter's directory, or raises InvalidArgument if it is unsupported."""
        self._read = read
        self._max_cpu_loras = max_cpu_loras
        self._loaded: dict[bytes, PackedLora] = {}

    def load(self, digest: bytes, directory: Path, kept: Collection[bytes] = ()) -> None:
        """Reads the adapter `digest` if it is not loaded yet. First drops all other adapters that
        are not in `kept`.

        Raises InvalidArgument if the adapter cannot be served, FailedPrecondition if its files do
        not match the digest, and ResourceExhausted if `max_cpu_loras` adapters are loaded already.
        """
        for other in self._loaded.keys() - {digest, *kept}:
            del self._loaded[other]
        if digest in self._loaded:
            return
        if len(self._loaded) >= self._max_cpu_loras:
            raise ResourceExhausted(
                f"{len(self._loaded)} adapters are loaded already, and max_cpu_loras allows no more"
            )
        adapter = self._read(directory)
        try:
            found = adapter_digest(directory)
        except OSError as error:
            raise InvalidArgument(f"{directory}: {error.strerror}", field="path") from error
        if found != digest:
            raise FailedPrecondition(
                f"{directory}: the adapter's files have changed since the gateway computed their "
                "digest",
                reason="ADAPTER_CHANGED",
            )
        self._loaded[digest] = adapter

    def lacks_any(self, step: StepInput) -> bool:
        """Whether a new request of a step uses an adapter that is not loaded."""
        wanted = {one.adapter_digest for one in step.new_requests if one.adapter_digest}
        return not self._loaded.keys() >= wanted

    def of_step(self, step: StepInput) -> dict[int, PackedLora]:
        """Maps rows of new requests to their loaded adapters. Raises InvalidStep if one is not
        loaded.
        """
        return find_adapters(step, self._loaded)


def find_adapters(step: StepInput, loaded: dict[bytes, PackedLora]) -> dict[int, PackedLora]:
    """Maps rows of new requests to their adapters. Raises InvalidStep if one is not in `loaded`."""
    found = {}
    for request in step.new_requests:
        if request.adapter_digest:
            adapter = loaded.get(request.adapter_digest)
            if adapter is None:
                problem = (
                    f"the adapter with digest {request.adapter_digest.hex()[:16]} is not loaded in "
                    "this worker"
                )
                raise InvalidStep.in_field(step.step, "new_requests.adapter_digest", problem)
            found[request.row] = adapter
    return found


def lora_rows(
    tokens: StepTokens, adapters: dict[int, PackedLora], device: Device
) -> LoraRows | None:
    """Groups the step's tokens by the adapters of their requests. Returns None if no request has
    one. `adapters` maps rows of the batch to adapters.
    """
    numbers: dict[PackedLora, int] = {}
    of_requests = np.full(len(tokens.rows), -1, np.int32)
    for index, row in enumerate(tokens.rows.tolist()):
        if (adapter := adapters.get(row)) is not None:
            of_requests[index] = numbers.setdefault(adapter, len(numbers))
    if not numbers:
        return None
    of_tokens = np.repeat(of_requests, tokens.num_scheduled_tokens)
    order = of_tokens.argsort(kind="stable")
    starts = of_tokens[order].searchsorted(np.arange(len(numbers) + 1)).astype(np.int32)
    rows = order[starts[0] :].astype(np.int32)
    return LoraRows(tuple(numbers), rows, starts - starts[0], len(of_tokens), device)
