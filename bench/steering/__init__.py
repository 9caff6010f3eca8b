"""The cost of steering: in the kernel, in the calls that send vectors, and in a whole engine."""
