"""The part `documents` of bench.extract: all tokens of long documents at some layers, as files on the disk.

`part` measures a job of residuum beside the engine alone. `child` is the process of another way: a loop with
transformers (`loop`), SAELens' runner (`saelens`) or vllm-lens (`lens`).
"""
