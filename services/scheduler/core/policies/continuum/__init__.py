"""The policies `continuum-fixed` and `continuum-ttl`: pins over the calls of tools, for comparison.

A *pin* is a request that has ended and keeps its blocks until a deadline, so that the next turn of
its program finds them. Requests of programs with a pin are admitted first, then those of the oldest
programs. `continuum-fixed` pins for two seconds, as the code published with Continuum does.
`continuum-ttl` computes the time as the paper does (arXiv 2511.02230).
"""

from services.scheduler.core.policies.continuum.policy import FixedPolicy, TTLPolicy

__all__ = ["FixedPolicy", "TTLPolicy"]
