"""Why something could not run, in one line that can stand in a report: no paths, no process numbers."""

from __future__ import annotations

import re

_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|NotFound)\b(?::.*)?)$")
_FOLLOWS = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization failed", "cancelled")
"""What vLLM says of an error that was told already."""
_PATH = re.compile(r"(?:/[\w.+@-]+){2,}/")
_LONGEST = 300


def reason(message: str, log: str) -> str:
    """Return the error that ended a process, out of its log; else what is known besides.

    Args:
        message: What is known besides.
        log: All that it printed.
    """
    found = [match[1].strip() for line in log.splitlines() if (match := _ERROR.search(line.rstrip()))]
    consequences = [index for index, line in enumerate(found) if any(word in line for word in _FOLLOWS)]
    # What comes after the first consequence is how other processes went down.
    roots = found[: consequences[0]] if consequences else found
    text = (roots or found or [message.splitlines()[0]])[-1]
    return _PATH.sub("…/", text)[:_LONGEST]
