"""Writes folders as jobs over datasets leave them, without any service."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np

from residuum.extraction.inputs.prompts import Item
from residuum.extraction.shards import FORMAT, Shard
from tests.client.support.captured import activations


def write_extraction(
    folder, shards, *, layers=(3, 5), width=4, sites=("resid_post",), total=None, values=None, dtype=np.float32, **spec
):
    """Write a job of several files; `shards` has the number of tokens of each prompt of each file.

    Element e of the row with number r at the layer l is 1000 r + 10 l + e, in float32, unless `values` is a function
    that returns rows [layers, rows, width] for numbers of rows. `spec` has further facts of the job.
    """
    folder.mkdir()
    first_row = first_prompt = 0
    for number, lengths in enumerate(shards):
        shard = Shard(number, first_prompt, as_float32=dtype is np.float32)
        for length in lengths:
            rows = np.arange(first_row, first_row + length)
            made = [1000.0 * rows[:, None] + 10 * layer + np.arange(width) for layer in layers]
            acts = activations(
                np.array(made if values is None else values(rows), dtype),
                layers=layers,
                prompt=length,
                sites=sites,
                dtype=np.dtype(dtype),
            )
            item = Item(first_prompt, first_prompt, "here", [1], {"y": first_prompt % 2}, "digest")
            usage = SimpleNamespace(generated_tokens=0)
            shard.add(item, acts, SimpleNamespace(prompt_token_ids=range(length), usage=usage))
            first_row, first_prompt = first_row + length, first_prompt + 1
        shard.write(folder / f"rows-{number:05}.safetensors", folder / f"prompts-{number:05}.jsonl")
    spec = {"prompts": first_prompt if total is None else total, "keep": ["y"], **spec}
    (folder / "job.json").write_text(json.dumps({"format": FORMAT, "spec": spec}))
    return folder
