"""The load of a replica, which consists of its outstanding work and its speed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load that a scheduler reports: its requests, and the speed of its latest steps.
    `seconds_per_prompt_token` and `seconds_per_decode` are the times that each prompt token and
    each decoding request add to a step. 0 means that the value is not known yet.
    """

    num_requests: int
    """The number of running and waiting requests."""
    num_uncomputed_tokens: int
    """Number of the requests' tokens that must still be computed or found in the prefix cache."""
    seconds_per_prompt_token: float = 0.0
    seconds_per_decode: float = 0.0
    num_other_requests: int = 0
    """How many of the requests were sent by gateways other than the receiver of this report."""
