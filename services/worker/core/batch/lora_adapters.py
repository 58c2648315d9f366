"""The adapters that a worker holds, by the digest of their files."""

from collections.abc import Callable, Collection
from pathlib import Path

from services.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from services.common.request.adapter_files import adapter_digest
from services.worker.backends.lora import PackedLora
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput


class LoraAdapters:
    """At most `max_cpu_loras` adapters in memory. Which ones is decided elsewhere. One that is
    forgotten while a request in the batch has it stays until that leaves.
    """

    def __init__(self, read: Callable[[Path], PackedLora], max_cpu_loras: int) -> None:
        """`read` returns the adapter of a directory. Raises InvalidArgument if it cannot be
        served.
        """
        self._read = read
        self._max_cpu_loras = max_cpu_loras
        self._loaded: dict[bytes, PackedLora] = {}

    def load(self, digest: bytes, directory: Path, kept: Collection[bytes] = ()) -> None:
        """Forgets all adapters but those `kept`, and reads one, unless it is loaded. Raises
        InvalidArgument if it cannot be served, FailedPrecondition if its files are not those of the
        digest, and ResourceExhausted if more would be loaded than may be.
        """
        for other in self._loaded.keys() - {digest, *kept}:
            del self._loaded[other]
        if digest in self._loaded:
            return
        if len(self._loaded) >= self._max_cpu_loras:
            raise ResourceExhausted(f"{len(self._loaded)} adapters are loaded, max_cpu_loras")
        adapter = self._read(directory)
        try:
            found = adapter_digest(directory)
        except OSError as error:
            raise InvalidArgument(f"{directory}: {error.strerror}", field="path") from error
        if found != digest:
            raise FailedPrecondition(
                f"{directory}: the adapter's files changed since their digest was taken",
                reason="ADAPTER_CHANGED",
            )
        self._loaded[digest] = adapter

    def lacks_any(self, step: StepInput) -> bool:
        """Whether a request that enters in a step has an adapter that is not loaded."""
        wanted = {one.adapter_digest for one in step.new_requests if one.adapter_digest}
        return not self._loaded.keys() >= wanted

    def of_step(self, step: StepInput) -> dict[int, PackedLora]:
        """The adapters of the requests that enter in a step, by row. Raises InvalidStep for one
        that is not loaded.
        """
        return find_adapters(step, self._loaded)


def find_adapters(step: StepInput, loaded: dict[bytes, PackedLora]) -> dict[int, PackedLora]:
    """See LoraAdapters.of_step."""
    found = {}
    for request in step.new_requests:
        if request.adapter_digest:
            adapter = loaded.get(request.adapter_digest)
            if adapter is None:
                name = "new_requests.adapter_digest"
                problem = f"no adapter {request.adapter_digest.hex()[:16]} is loaded here"
                raise InvalidStep(f"step {step.step}: {name}: {problem}", field=name)
            found[request.row] = adapter
    return found
