"""What steering costs: one kernel, one request on its way in, and a whole engine."""
