"""Many generations at once: what both clients check before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from residuum.exceptions import BatchFailed, InvalidRequest, ResiduumError
from residuum.protocol.requests import Prompt, short
from residuum.values.replies import Reply


def check_prompts(prompts: Iterable[Prompt], sampling: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a batch as a list.

    Raises:
        TypeError: They are one prompt, or an argument is given that belongs to one request.
    """
    if "updatable" in sampling:
        raise TypeError(
            "generate_many() takes no updatable: it belongs to one request, whose stream updates it. Open a "
            "stream(updatable=True) for each prompt."
        )
    for name in ("request_id", "registration"):
        if name in sampling:
            raise TypeError(
                f"generate_many() takes no {name}: it belongs to one request, and here are many. Take the ids from the "
                f"replies, or call generate({name}=...) for each prompt."
            )
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"generate_many() takes a list of prompts, not {short(prompts)}; write [prompt] for one.")
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer, Mapping)) for item in items):
        raise TypeError(
            "generate_many() takes a list of prompts, and this is one prompt, of token ids or the turns of one "
            "conversation; write [prompt]."
        )
    return items


def check_concurrency(max_concurrency: int) -> int:
    """Return how many may run at once.

    Raises:
        InvalidRequest: It is below 1.
    """
    if max_concurrency < 1:
        raise InvalidRequest(f"max_concurrency must be at least 1, not {max_concurrency}.", reason="INVALID_FIELD")
    return max_concurrency


def collect(replies: Sequence[Reply | None], errors: dict[int, ResiduumError]) -> list[Reply]:
    """Return the replies if there is one for each prompt.

    Raises:
        BatchFailed: There is not.
    """
    if errors:
        raise BatchFailed(replies, errors)
    return [reply for reply in replies if reply is not None]
