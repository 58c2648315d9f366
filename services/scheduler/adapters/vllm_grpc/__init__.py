"""`vllm.grpc.engine.VllmEngine` over the engine, for gateways that are made for vLLM, such as smg.
The package smg-grpc-proto defines the messages. Requests are converted to the requests that
Stepwell's gateways send, and then handled like these. Input and output are tokens, because the
clients of this service tokenize and detokenize.
"""
