"""Fuzzes a service for a given time, with atheris, which is guided by code coverage, or with random inputs.

    python -m tests.fuzz --service store --minutes 10

With atheris (`pip install --group fuzz`), inputs that reach new code are kept in the corpus. A failing input is written
to a file whose name is printed; pass that file to run it again. Without atheris, inputs are random, two processes run
them, each with its own service, and the seed of a failing one is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from tests.fuzz.random_inputs import CHECK_EVERY, TARGETS, run_random, target_of

_OURS = ["store_svc", "inference_svc", "svc_common", "residuum.rpc", "residuum.wire"]


def main() -> int:
    """Run a target until the time is up; the exit status is nonzero if an input failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", choices=TARGETS, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--corpus", type=Path, help="the folder of the corpus (atheris)")
    parser.add_argument(
        "--seed", type=int, default=None, help="the first seed of random inputs (default: a different one each time)"
    )
    parser.add_argument("--random", action="store_true", help="use random inputs even if atheris is installed")
    parser.add_argument("--jobs", type=int, default=2, help="processes with random inputs (default: 2)")
    parser.add_argument("inputs", nargs="*", type=Path, help="run only these files")
    options = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    if options.inputs:
        return _run_alone(target_of(options.service), options.inputs)
    if has_atheris and not options.random:
        return _run_atheris(options)
    print("inputs are random" + ("" if has_atheris else ": atheris is not installed"), flush=True)
    return run_random(options.service, options.minutes, options.jobs, options.seed)


def _run_alone(target: Any, inputs: list[Path]) -> int:
    with target() as running:
        for path in inputs:
            running.run(path.read_bytes())
            running.check()
    print(f"{len(inputs)} inputs, none failed")
    return 0


def _run_atheris(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=_OURS):
        target = target_of(options.service)
    running, count = target(), 0

    def run(data: bytes) -> None:
        nonlocal count
        running.run(data)
        count += 1
        if count % CHECK_EVERY == 0:
            running.check()

    flags = [sys.argv[0], f"-max_total_time={int(60 * options.minutes)}", "-max_len=512", "-len_control=0"]
    flags.append("-rss_limit_mb=4096")
    if options.seed is not None:
        flags.append(f"-seed={options.seed}")
    if options.corpus:
        options.corpus.mkdir(parents=True, exist_ok=True)
        flags.append(str(options.corpus))
    atheris.Setup(flags, run)
    atheris.Fuzz()  # ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
