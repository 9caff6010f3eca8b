"""One step of the engine: which row belongs to which request, and what is done to it. The same on every device."""
