"""Other systems that capture the residual stream, each run as its users would, in a separate process."""
