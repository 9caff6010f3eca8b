"""What capture and steering cost: vLLM as it is, beside vLLM with taps, in one run."""
