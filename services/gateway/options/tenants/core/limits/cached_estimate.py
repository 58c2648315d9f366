"""Estimates how many tokens of a prompt are cached, at the replica that has cached most of it."""

from collections.abc import Callable, Iterable

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.chain_keys import ChainKeys
from services.gateway.core.ports import PrefixDirectory
from services.gateway.core.request.request import EngineRequest

_MAX_SEGMENTS = 1024


class CachedEstimate:
    """Looks up the longest cached prefix of a prompt in the directory of cached prefixes."""

    def __init__(
        self, directory: PrefixDirectory, replicas: Callable[[], Iterable[Replica]]
    ) -> None:
        self._directory = directory
        self._replicas = replicas
        self._chain_keys = ChainKeys(_MAX_SEGMENTS)

    def num_cached_tokens(self, request: EngineRequest) -> int:
        """Returns the number of cached tokens of the prompt, which is less than the prompt's
        length. The result is 0 if the directory knows no cached prefix.
        """
        served = next((one.description for one in self._replicas() if one.is_ready), None)
        if served is None or request.prompt_embeds is not None or request.skip_reading_prefix_cache:
            return 0
        tokens = request.prompt_token_ids
        keys = self._chain_keys.of(
            served.fingerprint,
            tokens,
            served.block_size,
            request.cache_salt,
            served.hash_block_size,
            request.adapter_digest,
        )
        depth = max(self._directory.match(keys).values(), default=0)
        return min(depth * served.block_size, len(tokens) - 1)
