"""`python -m bench.conformance`: do the taps capture what transformers computes, architecture by architecture?"""
