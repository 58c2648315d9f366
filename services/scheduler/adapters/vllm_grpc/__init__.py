"""The gRPC service `vllm.grpc.engine.VllmEngine`, for gateways that are made for vLLM, such as smg.
The package smg-grpc-proto defines its messages, which are converted to the messages of Stepwell's
own gateways. Input and output are tokens: the clients tokenize and detokenize.
"""
