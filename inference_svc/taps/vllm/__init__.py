"""The taps in vLLM: its worker classes, its model runners (`runners/`) and the layers of its models (`layers/`)."""
