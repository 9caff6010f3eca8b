"""The bases of captures: vectors of the bank, signs of random projections, or encoders of sparse autoencoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inference_svc.taps.encodings.signs import SignCache, Signs
from residuum.wire.rows.encodings import RANDOM_PROJECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.encodings.sae_cache import SAECache
    from inference_svc.taps.encodings.sae_encoder import SAEEncoder
    from inference_svc.taps.plan import Capture

    Basis: TypeAlias = Tensor | SAEEncoder
    """What an encoding needs besides rows."""


class Bases:
    """Looks up the basis that a capture's rows are multiplied with."""

    def __init__(
        self, signs: SignCache, bank: VectorBank | None, sign_dtype: torch.dtype, saes: SAECache | None = None
    ) -> None:
        """Look bases up in a sign cache, a vector bank and a cache of encoders.

        Args:
            signs: The sign matrices.
            bank: The active vectors. None: no capture projects its rows to vectors.
            sign_dtype: The dtype of signs for rows in the model's dtype. Computed rows always take float32 signs.
            saes: The encoders. None: no capture keeps features.
        """
        self.has_saes = saes is not None
        """Whether captures may keep features of sparse autoencoders."""
        self._saes = saes
        self._signs = signs
        self._bank = bank
        self._sign_dtype = sign_dtype

    def of(self, capture: Capture) -> Basis | None:
        """Return the basis of a capture, or None if its encoding has none.

        The caller holds the basis until the capture's last block has left. The request has ended by then: its rows of
        the bank may hold other vectors, and its signs may have been evicted.

        Returns:
            Vectors, float32 [vectors, hidden]; signs, [hidden, dimensions]; or an encoder.

        Raises:
            KeyError: The encoder is not in this worker.
        """
        encoding = capture.encoding
        if encoding.sae:
            assert self._saes is not None  # noqa: S101 - otherwise the service accepts no such capture
            return self._saes.get(encoding.sae, encoding.chosen)
        if encoding.rows:
            assert self._bank is not None  # noqa: S101 - a worker has one
            return torch.stack([self._bank.vectors[row] for row in encoding.rows])
        if encoding.encoding in RANDOM_PROJECTIONS:
            dtype = self._dtype(computed=capture.is_computed)
            return self._signs.get(encoding.seed, encoding.dimensions, dtype)
        return None

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]], owner: int) -> list[bool | str]:
        """Make the signs of these projections on a thread and keep them; see `SignCache.keep`.

        Args:
            projections: The seed and the dimensions of each, and whether its rows are computed (see `is_computed`).
            owner: The process that keeps them.
        """
        return self._signs.keep(
            [Signs(seed, dimensions, self._dtype(computed=computed)) for seed, dimensions, computed in projections],
            owner,
        )

    def _dtype(self, *, computed: bool) -> torch.dtype:
        return torch.float32 if computed else self._sign_dtype
