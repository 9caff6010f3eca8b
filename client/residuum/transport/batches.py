"""Many generations at once: what both clients check before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from residuum.exceptions import BatchFailed, InvalidRequest, ResiduumError
from residuum.protocol.requests import Prompt, short
from residuum.values.replies import Reply


class BatchItem(NamedTuple):
    """One prompt of a batch."""

    prompt: Prompt
    request_id: str | None
    """The request's own name; None: the server makes one."""


def check_batch(
    prompts: Iterable[Prompt], request_ids: Iterable[str] | None, sampling: Mapping[str, Any]
) -> list[BatchItem]:
    """Return the prompts of a batch with their request IDs.

    Raises:
        InvalidRequest: There are not as many IDs as prompts, or two are the same.
        TypeError: The prompts are one prompt, or an argument is given that belongs to one request.
    """
    items = _check_prompts(prompts, sampling)
    if request_ids is None:
        return [BatchItem(prompt, None) for prompt in items]
    if isinstance(request_ids, (str, bytes)):
        raise TypeError(f"request_ids takes a list with an id for each prompt, not {short(request_ids)}.")
    names = list(request_ids)
    if len(names) != len(items):
        raise InvalidRequest(
            f"There are {len(items)} prompts and {len(names)} request_ids; give one for each prompt.",
            reason="INVALID_FIELD",
        )
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InvalidRequest(
            f"request_ids has {twice!r} more than once; give each prompt its own.", reason="INVALID_FIELD"
        )
    return [BatchItem(prompt, name) for prompt, name in zip(items, names, strict=True)]


def _check_prompts(prompts: Iterable[Prompt], sampling: Mapping[str, Any]) -> list[Prompt]:
    if "updatable" in sampling:
        raise TypeError(
            "generate_many() takes no updatable: it belongs to one request, whose stream updates it. Open a "
            "stream(updatable=True) for each prompt."
        )
    for name in ("request_id", "registration"):
        if name in sampling:
            raise TypeError(
                f"generate_many() takes no {name}: it belongs to one request, and here are many. Give "
                f"request_ids=[...], take the ids from the replies, or call generate({name}=...) for each prompt."
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
