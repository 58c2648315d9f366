"""The policies `continuum-fixed` and `continuum-ttl`: pins during tool calls, for comparison.

A program is the requests (turns) of one run of an agent. A *pin* is an ended request that keeps its
blocks until a deadline, so that the next turn of its program finds them cached. Requests of
programs with a pin are admitted first, then requests of the oldest programs. `continuum-fixed` pins
requests for two seconds, as the code published with Continuum does. `continuum-ttl` computes how
long it pins a request, as the paper does (arXiv 2511.02230).
"""

from services.scheduler.core.policies.continuum.policy import FixedPolicy, TTLPolicy

__all__ = ["FixedPolicy", "TTLPolicy"]
