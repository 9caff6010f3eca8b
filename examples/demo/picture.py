"""The demo's picture: the cosine of each token's residual stream with a direction, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt


@dataclass(frozen=True)
class Panel:
    """One reply."""

    title: str
    tokens: Sequence[str]
    rows: npt.NDArray[np.float32]
    """Its residual stream, [layers, positions, hidden]."""


def draw(panels: Sequence[Panel], direction: npt.NDArray[np.float32], steered_layer: int, path: Path) -> None:
    """Draw x . v^ / |x| for every layer and token of each panel, one above the other, as a PNG."""
    unit = direction / np.linalg.norm(direction)
    cosines = [panel.rows @ unit / np.linalg.norm(panel.rows, axis=-1) for panel in panels]
    bound = max(float(np.abs(values).max()) for values in cosines)
    figure, axes = plt.subplots(len(panels), 1, figsize=(13, 3.9 * len(panels)), layout="constrained")
    for axis, panel, values in zip(axes, panels, cosines, strict=True):
        image = axis.imshow(
            values, aspect="auto", origin="lower", cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest"
        )
        axis.axhline(steered_layer, color="black", linewidth=0.6, linestyle=":")
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.set_ylabel("decoder layer")
        labels = [token.replace("\n", "\\n").replace("$", r"\$") for token in panel.tokens]
        axis.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    figure.colorbar(image, ax=axes, label="cosine of the residual stream with the direction", shrink=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
