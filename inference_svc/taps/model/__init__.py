"""What a model is made of, found out by running it, and where the ops go in it. Nothing here knows vLLM."""
