"""`python -m inference_svc.shipping`: a shipper. The inference service starts it; by hand it serves for tests."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def leave_terminal() -> None:
    """Be no part of the parent's process group: Ctrl-C is for the parent, which stops shippers when it is time.

    But stay in its session. Linux may deal cores out to sessions before it looks at processes (autogroup, sched(7)):
    niceness would say nothing to the engine, which is in another one. A terminal that stops whoever writes to it from
    the background (`stty tostop`) must not stop what delivers rows.
    """
    with suppress(PermissionError):  # it leads a session: there is nothing to leave
        os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


if __name__ == "__main__":
    if "--parent-pid" in sys.argv:
        leave_terminal()  # before imports, which take time
    from inference_svc.shipping.shipper.program import main

    sys.exit(main())
