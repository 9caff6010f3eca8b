"""One step of the engine, on any device: which row belongs to which request, and what the taps do to it."""
