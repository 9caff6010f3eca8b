"""What encodings keep of rows, what they cost, and what they save: `python -m bench.encodings`."""
