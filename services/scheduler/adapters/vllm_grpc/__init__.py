"""The gRPC service `vllm.grpc.engine.VllmEngine`, for gateways that are made for vLLM, such as smg.
The package smg-grpc-proto defines its messages. Requests are converted to the messages that
Stepwell's gateways send, and are then handled in the same way. Input and output are tokens, because
the clients of this service tokenize and detokenize.
"""
