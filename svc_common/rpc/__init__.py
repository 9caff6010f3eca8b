"""What surrounds every call of both services: errors, time limits for stalled calls, metrics, traces, health."""
