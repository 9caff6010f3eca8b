"""The Triton kernels at tap points and of encodings, and what launches them."""
