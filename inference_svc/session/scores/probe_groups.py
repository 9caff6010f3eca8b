"""The probes of a request in groups: those with the same arithmetic are computed together, once for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.admission.probes import columns_of, num_products
from inference_svc.session.scores.joined import JoinedScores, ScoreLayout
from residuum.v1 import probe_pb2
from residuum.wire.probes.arithmetic import evaluate, num_outputs
from residuum.wire.probes.pooling import AttentionPool
from residuum.wire.probes.smoothing import Smoother

if TYPE_CHECKING:
    import numpy.typing as npt

    from inference_svc.admission.specs import SharedSpec

_EACH_ALONE = (probe_pb2.PROBE_ACTIVATION_UNSPECIFIED, probe_pb2.PROBE_ACTIVATION_SIGMOID)
"""Activations that treat each output alone."""


class _Group(NamedTuple):
    """Probes whose scores are computed together."""

    like: probe_pb2.Probe
    """One of them. All have its activation and smoothing; if it has attention or an MLP, it is alone."""
    outputs: slice | npt.NDArray[np.int64]
    """Their outputs in `ProbeGroups._outputs`, one probe after the other."""
    scores: slice | npt.NDArray[np.int64]
    """Where its scores are among those of all probes."""
    num_scores: int
    """The group's scores of each position."""
    is_plain: bool
    """Whether the outputs themselves are the scores, before smoothing."""


class Phase(NamedTuple):
    """What the scores of the prompt, or those of the reply, keep of the positions before. One for each group."""

    pools: list[AttentionPool | None]
    smoothers: list[Smoother | None]


def groups_of(spec: SharedSpec) -> ProbeGroups:
    """Return the groups of a spec's probes. Requests that share the spec share them."""
    return spec.derived(ProbeGroups, lambda: ProbeGroups(spec.probes or probe_pb2.ProbeSpec()))


class ProbeGroups:
    """Computes the scores of a request's probes. What positions leave behind is in a `Phase`."""

    def __init__(self, spec: probe_pb2.ProbeSpec) -> None:
        """Group the checked probes."""
        self._layout = ScoreLayout([num_outputs(probe) for probe in spec.probes])
        self._biases = np.array([output.bias for probe in spec.probes for output in probe.outputs], dtype=np.float32)
        first: list[int] = []
        self._further: list[tuple[slice, slice]] = []
        """Outputs, and the columns that are added to them: those at a further place."""
        together: dict[object, list[tuple[int, probe_pb2.Probe, int]]] = {}
        for index, (probe, columns) in enumerate(zip(spec.probes, columns_of(spec), strict=True)):
            at, count = len(first), len(probe.outputs)
            together.setdefault(_arithmetic(index, probe), []).append((index, probe, at))
            first += columns[:count]
            self._further += [(slice(at, at + count), slice(i, i + count)) for i in columns[count::count]]
        self.columns = sum(map(num_products, spec.probes))
        """The number of columns that the probes have on the score board."""
        self._first = np.array(first, dtype=np.int64)
        """The column of each output at its probe's first place."""
        self._is_in_order = first == list(range(self.columns))
        """Whether each output has one column, in the order of the outputs."""
        self._groups = [_group(items, self._layout) for items in together.values()]
        self.has_pools = any(probe.HasField("attention") for probe in spec.probes)

    def begin(self) -> Phase:
        """Return the state before the first position."""
        likes = [(group.like, group.num_scores) for group in self._groups]
        return Phase(
            [AttentionPool(like) if like.HasField("attention") else None for like, _ in likes],
            [Smoother(like.smoothing, outputs) if like.HasField("smoothing") else None for like, outputs in likes],
        )

    def pool(self, products: npt.NDArray[np.float32], phase: Phase) -> None:
        """Add positions to the pools, without scores of them.

        Args:
            products: The inner products at the next positions, float32 [positions, columns].
            phase: The state.
        """
        outputs = self._outputs(products)
        for group, pool in zip(self._groups, phase.pools, strict=True):
            if pool is not None:
                pool.add(outputs[:, group.outputs])

    def scores(self, products: npt.NDArray[np.float32], phase: Phase) -> JoinedScores:
        """Return the scores of each probe, float32 [positions, outputs].

        Args:
            products: The inner products at the next positions, float32 [positions, columns].
            phase: The state.
        """
        outputs = self._outputs(products)
        rows = np.empty((len(outputs), self._layout.width), dtype=np.float32)
        for group, pool, smoother in zip(self._groups, *phase, strict=True):
            scores = outputs[:, group.outputs]
            if not group.is_plain:
                scores = evaluate(group.like, scores if pool is None else pool.add(scores))
            rows[:, group.scores] = scores if smoother is None else smoother.add(scores)
        return JoinedScores(rows, self._layout)

    def _outputs(self, products: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the outputs of all probes, float32 [positions, outputs]: sums over the places that each reads."""
        if self._is_in_order:
            return products + self._biases
        sums = products[:, self._first]  # a copy
        with np.errstate(over="ignore", invalid="ignore"):  # huge rows give infinite outputs
            for outputs, columns in self._further:
                sums[:, outputs] += products[:, columns]
            sums += self._biases
        return sums


def _arithmetic(index: int, probe: probe_pb2.Probe) -> object:
    """Return what probes of the same group have in common."""
    is_alone = probe.mlp or probe.HasField("attention") or probe.activation not in _EACH_ALONE
    return index if is_alone else (probe.activation, probe.smoothing.SerializeToString())


def _group(items: list[tuple[int, probe_pb2.Probe, int]], layout: ScoreLayout) -> _Group:
    """Return the group of probes, each with its index and the number of its first output."""
    outputs = [first + at for _, probe, first in items for at in range(len(probe.outputs))]
    scores = [score for index, _, _ in items for score in range(layout.width)[layout.parts[index]]]
    like = items[0][1]
    is_plain = not (like.mlp or like.HasField("attention") or like.activation)
    return _Group(like, _selected(outputs), _selected(scores), len(scores), is_plain)


def _selected(columns: list[int]) -> slice | npt.NDArray[np.int64]:
    """Return what selects columns: of neighbours, a slice, which takes less time."""
    is_run = columns == list(range(columns[0], columns[0] + len(columns)))
    return slice(columns[0], columns[-1] + 1) if is_run else np.array(columns, dtype=np.int64)
