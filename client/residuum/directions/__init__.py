"""Directions of the residual stream: computed from two sets of captures, saved in files, used to steer.

A direction separates two kinds of text inside the model, such as happy and sad prompts, or replies that refuse and
replies that comply. `difference_of_means` and `pca` compute one for each layer. `Directions` holds them with their
origin.

Example:
    >>> capture = residuum.Capture(layers="all", positions="last_prompt")
    >>> happy = client.generate_many(happy_prompts, max_tokens=1, capture=capture)
    >>> sad = client.generate_many(sad_prompts, max_tokens=1, capture=capture)
    >>> joy = residuum.directions.difference_of_means(map(client.activations, happy), map(client.activations, sad))
    >>> client.generate("When I opened the door, I saw", steer=joy.add(layers=[12], scale=1.0))
    >>> joy.save("joy.safetensors")

Sources:
    Zou et al. 2023, Representation Engineering: A Top-Down Approach to AI Transparency, arXiv:2310.01405.
    Marks & Tegmark 2023, The Geometry of Truth, arXiv:2310.06824.
    Rimsky et al. 2023, Steering Llama 2 via Contrastive Activation Addition, arXiv:2312.06681.
    Arditi et al. 2024, Refusal in Language Models Is Mediated by a Single Direction, arXiv:2406.11717.
    Chen et al. 2025, Persona Vectors: Monitoring and Controlling Character Traits in Language Models, arXiv:2507.21509.
    repeng, https://github.com/vgel/repeng (read at 0.4.0).
"""

from __future__ import annotations

from residuum.directions.methods import difference_of_means, pca
from residuum.directions.values import Directions, Origin

__all__ = ["Directions", "Origin", "difference_of_means", "pca"]
