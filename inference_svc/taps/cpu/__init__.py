"""The taps on a CPU, implemented in torch."""
