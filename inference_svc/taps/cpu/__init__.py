"""The taps on a CPU, in torch."""
