"""Tracks which encoder outputs are cached on the workers. An output is the embeddings of one prompt
item, such as an image. All requests with equal items share one output. An output that no request
uses stays cached until its space is needed. Sizes count embeddings. Ideas and names follow vLLM's
EncoderCacheManager.
"""

from collections.abc import Mapping, Sequence

from services.common.request.encoder_input import EncoderInput
from services.scheduler.core.request import Request


class EncoderCacheManager:
    """Tracks which items have a cached output, and which requests use each output."""

    def __init__(self, cache_size: int) -> None:
        self._size = cache_size
        self.evicted: list[str] = []
        """Items whose outputs were evicted since the last call of `take_evicted`."""
        self._empty()

    def _empty(self) -> None:
        self.num_free = self._size
        """Free space, in embeddings."""
        self._users: dict[str, set[Request]] = {}
        """Maps the identifier of an item to the requests that use its output."""
        self._num_embeds: dict[str, int] = {}
        self._unused: dict[str, int] = {}
        """Maps items that no request uses to their sizes, the longest unused item first."""
        self.used_inputs: dict[Request, set[int]] = {}
        """Maps a request to the indexes of the items that it uses."""

    @property
    def num_freeable(self) -> int:
        """Space, in embeddings, that is free or can be freed by evicting unused items."""
        return self.num_free + sum(self._unused.values())

    @property
    def unused(self) -> Sequence[str]:
        """Items that no request uses, in the order in which they would be evicted."""
        return list(self._unused)

    @property
    def used(self) -> Mapping[str, set[Request]]:
        """Maps the identifier of each item in use to the requests that use its output."""
        return {identifier: users for identifier, users in self._users.items() if users}

    def copy(self) -> "EncoderCacheManager":
        """A copy, for trying decisions that may be undone."""
        copy = EncoderCacheManager(self._size)
        copy.restore(self)
        return copy

    def restore(self, earlier: "EncoderCacheManager") -> None:
        self.num_free = earlier.num_free
        self._users = {name: set(users) for name, users in earlier._users.items()}
        self._num_embeds = dict(earlier._num_embeds)
        self._unused = dict(earlier._unused)
        self.used_inputs = {request: set(used) for request, used in earlier.used_inputs.items()}
        self.evicted = list(earlier.evicted)

    def reset(self) -> None:
        """Removes all outputs, including outputs in use, without adding them to `evicted`."""
        self.evicted = []
        self._empty()

    def num_cached_embeds(self, identifier: str) -> int | None:
        """The size of an item's cached output, in embeddings. None if the output is not cached."""
        return self._num_embeds.get(identifier)

    def use_cached(self, request: Request, index: int) -> bool:
        """Marks the output of item `index` as used. Returns False if the output is not cached."""
        identifier = request.encoder_inputs[index].identifier
        users = self._users.get(identifier)
        if users is None:
            return False
        self._unused.pop(identifier, None)
        users.add(request)
        self.used_inputs.setdefault(request, set()).add(index)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Evicts unused outputs until `num_embeds` fit. Returns False if they cannot fit."""
        if num_embeds > self.num_freeable:
            return False
        while num_embeds > self.num_free:
            identifier = next(iter(self._unused))
            self.num_free += self._unused.pop(identifier)
            del self._users[identifier], self._num_embeds[identifier]
            self.evicted.append(identifier)
        return True

    def allocate(self, request: Request, index: int) -> None:
        """Allocates space for the output of an item, after `make_room` has returned True."""
        item = request.encoder_inputs[index]
        self.num_free -= item.num_embeds
        if self.num_free < 0:
            raise AssertionError("the encoder cache is overfull")
        self._users[item.identifier] = {request}
        self._num_embeds[item.identifier] = item.num_embeds
        self.used_inputs.setdefault(request, set()).add(index)

    def free_computed(self, request: Request, num_tokens: int) -> None:
        """Ends a request's use of the items that end within its first `num_tokens` tokens."""
        for index in sorted(self.used_inputs.get(request, ())):
            if request.encoder_inputs[index].end <= num_tokens:
                self._free_input(request, index)

    def free(self, request: Request) -> None:
        for index in sorted(self.used_inputs.get(request, ())):
            self._free_input(request, index)

    def take_evicted(self) -> list[str]:
        """Returns the items in `evicted` that are not cached again, and clears `evicted`."""
        evicted, self.evicted = self.evicted, []
        return [identifier for identifier in evicted if identifier not in self._users]

    def _free_input(self, request: Request, index: int) -> None:
        """Ends a request's use of one item. An item that occurs twice is freed twice."""
        inputs = self.used_inputs[request]
        inputs.remove(index)
        items: Sequence[EncoderInput] = request.encoder_inputs
        identifier = items[index].identifier
        if not inputs:
            del self.used_inputs[request]
        elif any(items[other].identifier == identifier for other in inputs):
            return
        users = self._users[identifier]
        users.discard(request)
        if not users:
            self._unused[identifier] = self._num_embeds[identifier]
