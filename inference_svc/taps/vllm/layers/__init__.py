"""Layers of vLLM's models: attention, experts and norms, and how tensor-parallel ranks share them."""
