"""`python -m inference_svc.shipping`: runs a shipper. The inference service starts it, and so do tests."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def leave_terminal() -> None:
    """Leave the parent's process group, so that Ctrl-C reaches only the parent, which then stops its shippers in order.

    The shipper stays in the parent's session. Linux may divide the cores among sessions first (autogroup, sched(7)),
    and niceness counts only within a session: in a session of its own, the shipper would not give way to the engine.

    SIGTTOU is ignored: a terminal set to `stty tostop` would otherwise stop a background process that writes a log.
    """
    with suppress(PermissionError):  # a session leader is already alone in its process group
        os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


if __name__ == "__main__":
    if "--parent-pid" in sys.argv:
        leave_terminal()  # before the imports, which take long enough for a Ctrl-C
    from inference_svc.shipping.shipper.program import main

    sys.exit(main())
