"""What a request captures, and what a capture holds: its manifest, rows, tokens and messages."""
