"""The texts of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from residuum.v1 import capture_pb2


def split_texts(proto: capture_pb2.TokenTexts) -> tuple[str, ...]:
    """Return the text of each token."""
    text, ends = proto.text, list(accumulate(proto.lengths))
    return tuple(text[start:end] for start, end in zip([0, *ends], ends, strict=False))


def offsets_of(texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """Return where each text begins and ends in all of them joined: int64 [texts, 2], in characters."""
    ends = np.fromiter(accumulate(map(len, texts), initial=0), dtype=np.int64)
    return np.stack([ends[:-1], ends[1:]], axis=1)
