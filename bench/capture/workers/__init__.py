"""What benchmarks put into vLLM's workers: methods that they call there, and taps that do nothing."""
