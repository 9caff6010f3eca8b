"""Writing captures: what comes in, what one transaction does, and what is deleted."""
