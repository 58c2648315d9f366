"""Clients' sessions: prompts that grow turn by turn. vLLM calls a session a resumable request."""

from services.gateway.options.sessions.option import Sessions, SessionSettings

__all__ = ["SessionSettings", "Sessions"]
