"""The policy `program` minimizes the time to finish agents' programs instead of single requests.

A program is the requests (turns) of one run of an agent. Each turn begins with the tokens of the
previous turn. Between two turns, in a pause, a tool runs. The blocks that an ended turn leaves in
the pool are its context. The policy keeps a context as long as this saves more time than using its
blocks for another request. The policy first admits requests whose contexts are cached, then
requests of old programs and of programs with little expected remaining work.
"""

from services.scheduler.core.policies.program.policy import RETENTION_SETTINGS, ProgramPolicy

__all__ = ["RETENTION_SETTINGS", "ProgramPolicy"]
