"""`make demo`: a real language model captured, checked against transformers, and steered."""
