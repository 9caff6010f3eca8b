"""The scores of a request's probes while it generates, and the rules that act on them."""
