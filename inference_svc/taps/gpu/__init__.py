"""The taps on a GPU: tables at fixed addresses, Triton kernels, and a stream of their own."""
