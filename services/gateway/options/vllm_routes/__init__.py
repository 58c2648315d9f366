"""vLLM's HTTP routes for ranking, classifying and pooling texts, and for tokens."""

from services.gateway.options.vllm_routes.routes import VllmRoutes

__all__ = ["VllmRoutes"]
