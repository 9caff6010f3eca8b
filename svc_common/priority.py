"""Process priority: lets a process yield the processor to others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def give_way(niceness: int) -> None:
    """Raise the niceness of all threads of this process. Threads started later inherit it.

    Linux keeps a niceness per thread, and libraries start threads when they are imported.

    Args:
        niceness: The increment, as for `nice`; 0 changes nothing.
    """
    if not niceness:
        return
    wanted = os.getpriority(os.PRIO_PROCESS, 0) + niceness
    seen: set[int] = set()
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - seen:
        for thread in new:
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
        seen |= new  # look again: a thread may have started another before its own niceness changed
