"""Further HTTP routes of vLLM: for ranking, classifying and pooling texts, and for tokens."""

from services.gateway.options.vllm_routes.option import VllmRoutes

__all__ = ["VllmRoutes"]
