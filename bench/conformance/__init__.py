"""`python -m bench.conformance`: compares captured rows with transformers, architecture by architecture."""
