"""Draws the plots of a suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.suite.plan import ALL_LAYERS, BASELINE
from bench.suite.results import Line, Measured, curve

_DPI = 120


def draw(measured: Mapping[str, Measured], folder: Path) -> list[str]:
    """Draw the plots for which there are enough figures; return the names of the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    painters: dict[str, Callable[[Any, Mapping[str, Measured]], bool]] = {
        "overhead.png": _overhead,
        "iterations.png": _iterations,
        "peers.png": _peers,
    }
    drawn = []
    for name, paint in painters.items():
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        if paint(axes, measured):
            axes.spines[["top", "right"]].set_visible(False)
            # Without the date and matplotlib's version, so that the same figures give the same file.
            figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
            drawn.append(name)
        pyplot.close(figure)
    return drawn


def _overhead(axes: Any, measured: Mapping[str, Measured]) -> bool:
    points, base = curve(measured), measured.get(BASELINE)
    line = Line.through([(item.layers, item.generation) for item in points])
    if line is None or base is None:
        return False
    for item in points:
        overheads = [100 * (value / base.generation - 1) for run in item.times() for value in run]
        axes.plot([item.layers] * len(overheads), overheads, ".", color="tab:blue", alpha=0.35)
    layers = [item.layers for item in points]
    axes.plot(layers, [100 * (item.over(base) - 1) for item in points], "o", color="tab:blue", label="median")
    fitted = [100 * ((line.intercept + line.slope * count) / base.generation - 1) for count in layers]
    axes.plot(layers, fitted, "--", color="tab:gray", label="the line that fits best")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="captured layers", ylabel="generation over the baseline, %", title="Overhead by number of layers")
    axes.legend(frameon=False)
    return True


def _iterations(axes: Any, measured: Mapping[str, Measured]) -> bool:
    shown = [item for item in measured.values() if item.name in {BASELINE, ALL_LAYERS} or item.peer]
    for item in shown:
        for number, generation in enumerate(item.times()):
            relative = [value / generation[0] for value in generation]
            (curve_,) = axes.plot(range(1, len(relative) + 1), relative, ".-", label=None if number else item.name)
            curve_.set_color(f"C{shown.index(item) % 10}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="iteration", ylabel="generation over the process's first", title="Does it drift?")
    axes.legend(frameon=False, fontsize="small")
    return bool(shown)


def _peers(axes: Any, measured: Mapping[str, Measured]) -> bool:
    peers = [item for item in measured.values() if item.peer]
    ours = [measured[name] for name in (BASELINE, ALL_LAYERS) if name in measured]
    if not peers or not ours:
        return False
    shown = [*ours, *sorted(peers, key=lambda item: item.total or item.generation)][::-1]
    names = ["residuum, all layers" if item.name == ALL_LAYERS else item.name for item in shown]
    generation = [item.generation for item in shown]
    axes.barh(names, generation, color="tab:blue", label="generation")
    axes.barh(names, [item.fetch or 0.0 for item in shown], left=generation, color="tab:orange", label="fetch")
    axes.set(xlabel="seconds", title="All layers of every token, until the client holds them")
    axes.legend(frameon=False)
    return True
