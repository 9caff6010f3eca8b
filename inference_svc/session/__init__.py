"""A request while it runs: its reservation, its capture session, its generation, and changes of its steering."""
