"""How a process stands towards others that want the same core."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def give_way(niceness: int) -> None:
    """Add to the niceness of this process: of all its threads, and so of those to come.

    Linux keeps a niceness for each thread, and libraries start threads when they are imported.

    Args:
        niceness: How much, as for `nice`; 0 changes nothing.
    """
    if not niceness:
        return
    wanted = os.getpriority(os.PRIO_PROCESS, 0) + niceness
    seen: set[int] = set()
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - seen:
        for thread in new:
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
        seen |= new  # and again: one that was not nice yet may have started another meanwhile
