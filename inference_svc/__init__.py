"""The inference service: vLLM with taps inside the model, behind gRPC."""
