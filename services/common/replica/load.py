"""How much a replica has to do, and how fast it does it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a scheduler reports of all its requests, and of its last steps.

    `seconds_per_prompt_token` and `seconds_per_decode` are what each token of a prompt and each
    decoding request add to the time of a step; 0: not known yet.
    """

    num_requests: int
    """Requests that run or wait."""
    num_uncomputed_tokens: int
    """Tokens of them whose keys and values are still to be computed or found in the cache."""
    seconds_per_prompt_token: float = 0.0
    seconds_per_decode: float = 0.0
    num_other_requests: int = 0
    """The part of `num_requests` that came from other gateways than the one that gets this."""
