"""`vllm.grpc.engine.VllmEngine` over the engine, for gateways that are made for vLLM, such as smg.

The messages are defined by the package smg-grpc-proto. Requests are converted to the requests that
Stepwell's gateways send, and are then handled in the same way. Input and output are tokens, because
the client of this service tokenizes and detokenizes.
"""
