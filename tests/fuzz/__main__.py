"""Fuzzes a service for a given time, with atheris, which is guided by code coverage, or with random inputs.

    python -m tests.fuzz --service store --minutes 10

With atheris (`pip install --group fuzz`), inputs that reach new code are kept in the corpus. A failing input is written
to a file whose name is printed; pass that file to run it again. Without atheris, inputs are random, and the seed of a
failing one is printed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any

_TARGETS = {"store": ("tests.fuzz.store", "FuzzedStore"), "inference": ("tests.fuzz.inference", "FuzzedInference")}
_OURS = ["store_svc", "inference_svc", "svc_common", "residuum.rpc", "residuum.wire"]
_CHECK_EVERY = 50


def main() -> int:
    """Run a target until the time is up; the exit status is nonzero if an input failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", choices=_TARGETS, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--corpus", type=Path, help="the folder of the corpus (atheris)")
    parser.add_argument(
        "--seed", type=int, default=None, help="the first seed of random inputs (default: a different one each time)"
    )
    parser.add_argument("--random", action="store_true", help="use random inputs even if atheris is installed")
    parser.add_argument("inputs", nargs="*", type=Path, help="run only these files")
    options = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    if options.inputs:
        return _run_alone(_target(options.service), options.inputs)
    if has_atheris and not options.random:
        return _run_atheris(options)
    print("inputs are random" + ("" if has_atheris else ": atheris is not installed"), flush=True)
    return _run_random(_target(options.service), options)


def _target(service: str) -> Any:
    module, name = _TARGETS[service]
    return getattr(importlib.import_module(module), name)


def _run_alone(target: Any, inputs: list[Path]) -> int:
    with target() as running:
        for path in inputs:
            running.run(path.read_bytes())
            running.check()
    print(f"{len(inputs)} inputs, none failed")
    return 0


def _run_random(target: Any, options: argparse.Namespace) -> int:
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6) * 10**6
    end, count, before = time.monotonic() + 60 * options.minutes, 0, 0.0
    with target() as running:
        while time.monotonic() < end:
            data = random.Random(seed + count).randbytes(128)
            try:
                running.run(data)
                if count % _CHECK_EVERY == 0:
                    running.check()
            except AssertionError as error:
                print(f"--seed {seed + count}: {error}\ninput: {data.hex()}", flush=True)
                return 1
            count += 1
            if time.monotonic() - before > 10:
                before = time.monotonic()
                print(f"{count} inputs, {running.caller.messages} messages, {_resident_mib():.0f} MiB", flush=True)
        running.check()
    print(f"{count} inputs with {running.caller.messages} messages from --seed {seed}, none failed")
    return 0


def _run_atheris(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=_OURS):
        target = _target(options.service)
    running, count = target(), 0

    def run(data: bytes) -> None:
        nonlocal count
        running.run(data)
        count += 1
        if count % _CHECK_EVERY == 0:
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


def _resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
