"""The taps on a GPU: Triton kernels, tables at fixed addresses, and a CUDA stream for copies to the ring."""
