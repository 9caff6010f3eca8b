"""The cost of the taps on the host in each step, without an engine."""
