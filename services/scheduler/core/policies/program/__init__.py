"""The policy `program`: finishes agents' programs instead of requests.

A program is the requests of one run of an agent, each of which begins with the tokens of the one
before. Between two of them, in a pause, a tool runs. The policy keeps the blocks of paused contexts
for as long as they are worth more than what another request gains, admits requests with cached
contexts first, and then programs with the least expected remaining work.
"""

from services.scheduler.core.policies.program.policy import RETENTION_SETTINGS, ProgramPolicy

__all__ = ["RETENTION_SETTINGS", "ProgramPolicy"]
