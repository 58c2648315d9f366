"""`vllm.grpc.engine.VllmEngine` over the engine, for gateways that are made for vLLM, such as smg.

The messages are those of the package smg-grpc-proto. Requests become the ones that our own gateways
send, and go the same way from there on. Input and output are tokens: a client of this service
tokenizes, and turns tokens into text, by itself.
"""
