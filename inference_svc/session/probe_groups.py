"""The probes of a request in groups: those with the same arithmetic are computed together, once for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.admission.probes import in_columns
from residuum.v1 import probe_pb2
from residuum.wire.pooling import AttentionPool
from residuum.wire.probes import evaluate, num_outputs
from residuum.wire.smoothing import Smoother

if TYPE_CHECKING:
    import numpy.typing as npt

    from inference_svc.engine.streams import Scored

_EACH_ALONE = (probe_pb2.PROBE_ACTIVATION_UNSPECIFIED, probe_pb2.PROBE_ACTIVATION_SIGMOID)
"""Activations that treat each output alone."""


class _Group(NamedTuple):
    """Probes whose scores are computed together."""

    like: probe_pb2.Probe
    """One of them. All have its activation and smoothing; if it has attention or an MLP, it is alone."""
    columns: slice | npt.NDArray[np.int64]
    """The columns of their outputs on the score board, one probe after the other."""
    members: list[tuple[int, slice]]
    """The index of each probe, and its part of the group's scores."""
    outputs: int
    """The group's scores of each position."""


class Phase(NamedTuple):
    """What the scores of the prompt, or those of the reply, keep of the positions before. One for each group."""

    pools: list[AttentionPool | None]
    smoothers: list[Smoother | None]


class ProbeGroups:
    """Computes the scores of a request's probes."""

    def __init__(self, spec: probe_pb2.ProbeSpec) -> None:
        """Group the checked probes."""
        self._count = len(spec.probes)
        placed = in_columns(spec)
        self._biases = np.array([output.bias for _, probe, _ in placed for output in probe.outputs], dtype=np.float32)
        together: dict[object, list[tuple[int, probe_pb2.Probe, int]]] = {}
        for item in placed:
            together.setdefault(_arithmetic(*item[:2]), []).append(item)
        self._groups = [_group(items) for items in together.values()]
        self.has_pools = any(probe.HasField("attention") for probe in spec.probes)

    @property
    def columns(self) -> int:
        """The number of columns that the probes have on the score board."""
        return len(self._biases)

    def begin(self) -> Phase:
        """Return the state before the first position."""
        likes = [(group.like, group.outputs) for group in self._groups]
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
        outputs = products + self._biases
        for group, pool in zip(self._groups, phase.pools, strict=True):
            if pool is not None:
                pool.add(outputs[:, group.columns])

    def scores(self, products: npt.NDArray[np.float32], phase: Phase) -> Scored:
        """Return the scores of each probe, float32 [positions, outputs].

        Args:
            products: The inner products at the next positions, float32 [positions, columns].
            phase: The state.
        """
        outputs = products + self._biases
        found: list[npt.NDArray[np.float32]] = [outputs] * self._count
        for group, pool, smoother in zip(self._groups, *phase, strict=True):
            own = outputs[:, group.columns]
            scores = evaluate(group.like, own if pool is None else pool.add(own))
            if smoother is not None:
                scores = smoother.add(scores)
            for index, part in group.members:
                found[index] = scores[:, part]
        return tuple(found)


def _arithmetic(index: int, probe: probe_pb2.Probe) -> object:
    """Return what probes of the same group have in common."""
    is_alone = probe.mlp or probe.HasField("attention") or probe.activation not in _EACH_ALONE
    return index if is_alone else (probe.activation, probe.smoothing.SerializeToString())


def _group(items: list[tuple[int, probe_pb2.Probe, int]]) -> _Group:
    columns = [column + at for _, probe, column in items for at in range(len(probe.outputs))]
    members, end = [], 0
    for index, probe, _ in items:
        members.append((index, slice(end, end + num_outputs(probe))))
        end = members[-1][1].stop
    is_run = columns[-1] - columns[0] == len(columns) - 1
    where = slice(columns[0], columns[-1] + 1) if is_run else np.array(columns, dtype=np.int64)
    return _Group(items[0][1], where, members, end)
