"""How a process that has measured hands its result over, and ends at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from bench.capture.memory import descendants

_TRACKER = b"multiprocessing.resource_tracker"
"""Python's process that removes what shared memory others leave behind."""


def hand_over(file: Path, result: Any) -> NoReturn:
    """Write a result, then end this process and all that it has started; `bench.children.run_child` waits for it.

    A graceful end has nothing more to save, and takes long: three processes with vLLM's modules, one after the other,
    free every object. Only the tracker of shared memory stays until it has removed theirs.

    Args:
        file: Where the result goes, as JSON.
        result: The result.
    """
    file.write_text(json.dumps(result))
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has gone
            if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
