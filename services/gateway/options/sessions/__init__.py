"""Clients' sessions: prompts that grow turn by turn. vLLM calls such requests resumable."""

from services.gateway.options.sessions.option import Sessions, SessionSettings

__all__ = ["SessionSettings", "Sessions"]
