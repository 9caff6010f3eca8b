"""Other ways to capture the residual stream, each as its users would run it, in a process of its own."""
