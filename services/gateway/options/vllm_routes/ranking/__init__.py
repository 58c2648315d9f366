"""vLLM's routes for models that compute a vector or a score of a prompt instead of text: rerank,
classify and pooling.
"""
