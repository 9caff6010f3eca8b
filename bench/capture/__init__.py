"""The cost of capture and steering: stock vLLM compared with vLLM with taps, in one run."""
