"""The taps in vLLM: its worker classes, model runners, models and norms."""
