"""One request while it runs, from its first check to its seal."""
