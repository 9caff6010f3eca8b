"""`python -m tests.conformance`: `bench.conformance` with services that are forks of one process.

It takes the arguments of `bench.conformance` and does the same, on a CPU in ten minutes instead of an hour: the forks
need not import vLLM again.
"""

from __future__ import annotations

import functools
from unittest.mock import patch

from bench.conformance import __main__ as conformance
from bench.conformance.check import check
from tests import warm_start

if __name__ == "__main__":
    with patch.object(conformance, "check", functools.partial(check, launch=warm_start.launch)):
        conformance.main()
