"""What the taps cost the host in each step, without an engine."""
