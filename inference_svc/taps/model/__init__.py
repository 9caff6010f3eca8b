"""The structure of a model, found by running it, and the insertion of the ops. No module here imports vLLM."""
