"""`make soak`: stores and shippers are killed at random while captures are written, and every row is counted.

    python -m tests.faults.soak --seconds 600 --seed 7

Everything but the model is real: a ring in shared memory, shippers under their supervisor, a store on LMDB. A few
threads publish rows as a worker does, seal the captures, read everything back and compare. Each round kills a process
with SIGKILL after some acknowledgements, so at an arbitrary moment. It then checks that all acknowledged rows survived.
The exit status is 0 if no row was lost, duplicated or changed and nothing got stuck.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from svc_common.logs import configure_logs
from tests.faults.support import COMPLETE, DEADLINE, ENVIRONMENT, Capture, Ring, Shippers, Store

VICTIMS = ("store", "shipper", "both", "starting store")
_RING_BYTES = 1 << 20
_MOST_ACKS = 64
"""The most extents that are acknowledged between two kills; the ring holds 32."""


@dataclass
class Tally:
    """The counts of a soak."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    """Captures that were written, sealed and read back."""
    written: int = 0
    """Rows that were published and read back."""
    lost: int = 0
    """Missing rows that were acknowledged, or that belong to a sealed capture."""
    doubled: int = 0
    """Rows that a read returned more than once."""
    wrong: int = 0
    """Rows whose bytes differ from the published ones."""
    incomplete: int = 0
    """Captures that did not end COMPLETE."""
    troubles: list[str] = field(default_factory=list)
    """What got stuck or failed, in words."""

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.doubled or self.wrong or self.incomplete or self.troubles)

    def __str__(self) -> str:
        kills = ", ".join(f"{victim} {count}" for victim, count in sorted(self.kills.items()))
        lines = [
            f"rounds {self.rounds} (killed: {kills or 'nothing'})",
            f"captures {self.captures}, not complete {self.incomplete}",
            f"rows written {self.written}",
            f"rows lost {self.lost}",
            f"rows doubled {self.doubled}",
            f"rows changed {self.wrong}",
        ]
        return "\n".join([*lines, *(f"TROUBLE {trouble}" for trouble in self.troubles)])


class Soak:
    """A store, shippers, and writers that run until the end; see the module."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        victims: Sequence[str] = VICTIMS,
        shippers: int = 2,
        writers: int = 3,
        length: int = 2048,
        shards: int | None = None,
        shared_memory: str = "auto",
    ) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._victims = victims
        self._length = length
        self._lock = threading.Lock()  # guards the tally and the captures
        self._stopping = threading.Event()
        self._live: dict[str, Capture] = {}  # open or complete, and not being deleted
        flags = ["--shared-memory", shared_memory, *(() if shards is None else ("--shards", str(shards)))]
        self._store = Store(folder, "--log-level", "error", *flags)
        self._ring = Ring(folder / "ring", ring_bytes=_RING_BYTES)
        self._ring.start()
        self._shippers = Shippers(folder / "ring", self._store.endpoint, shippers, "--log-level", "error")
        self._writers = [threading.Thread(target=self._guard, args=(number,)) for number in range(writers)]

    def run(self, *, seconds: float = float("inf"), rounds: int | None = None, show: bool = False) -> Tally:
        """Kill until the time or the rounds are over, let running captures end, and return the tally."""
        end = time.monotonic() + seconds
        for writer in self._writers:
            writer.start()
        try:
            while time.monotonic() < end and self.tally.rounds != rounds and not self.tally.troubles:
                self._round()
                if show and self.tally.rounds % 10 == 0:
                    print(f"round {self.tally.rounds}: {self.tally.written} rows, {self.tally.lost} lost", flush=True)
        finally:
            self._close()
        return self.tally

    def _round(self) -> None:
        """Wait for some acknowledgements, kill, and check all acknowledged rows."""
        if not self._ring.wait_for_acks(self._random.randint(1, _MOST_ACKS)):
            self._trouble(f"no acknowledgements within {DEADLINE:g} s")
            return
        victim = self._random.choice(self._victims)
        with self._lock:
            captures = list(self._live.values())
        acked = [(capture, self._ring.acked(capture)) for capture in captures]
        if victim in ("shipper", "both"):
            self._kill_shipper()
        if victim != "shipper":
            self._store.kill()
            self._store.start(wait=False)
        if victim == "starting store":
            self._stopping.wait(self._random.uniform(0, 0.8))  # during its start, or just after
            self._store.kill()
            self._store.start(wait=False)
        self._store.wait_until_serving()
        for capture, rows in acked:
            self._check(capture, rows)
        self.tally.rounds += 1
        self.tally.kills[victim] += 1

    def _kill_shipper(self) -> None:
        pids = self._shippers.pids()
        if pids:
            self._shippers.kill(self._random.choice(pids))

    def _check(self, capture: Capture, acked: set[tuple[int, int]]) -> None:
        """Count the acknowledged rows that are missing."""
        try:
            found = self._store.read(capture)
        except grpc.RpcError as error:
            with self._lock:
                gone = capture.name not in self._live
            if gone and error.code() is grpc.StatusCode.NOT_FOUND:
                return  # its writer has checked and deleted it
            raise
        with self._lock:
            self.tally.lost += len(acked - set(found.times))
            self.tally.doubled += found.doubled
            self.tally.wrong += found.wrong

    def _guard(self, writer: int) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                width = 64 if number % 2 else 128  # blocks of the wider ones pass through shared memory
                self._write(Capture(f"writer-{writer}-{number}", self._length, width))
                number += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the verdict must not be good
            self._trouble(f"writer {writer} failed: {error!r}, caused by {error.__cause__!r}")

    def _write(self, capture: Capture) -> None:
        """Write a capture, end it, compare it, delete it."""
        self._store.open(capture)
        with self._lock:
            self._live[capture.name] = capture
        for positions in capture.blocks():
            self._ring.publish_rows(capture, positions)
        self._store.seal(capture)
        manifest = self._store.manifest(capture, wait=True)
        found = self._store.read(capture)
        with self._lock:
            self.tally.captures += 1
            self.tally.incomplete += manifest.state != COMPLETE
            self.tally.written += len(found.times)
            self.tally.lost += len(capture.rows() - set(found.times))
            self.tally.doubled += found.doubled
            self.tally.wrong += found.wrong
            del self._live[capture.name]
        self._store.delete(capture)
        self._ring.forget(capture)

    def _trouble(self, text: str) -> None:
        with self._lock:
            self.tally.troubles.append(text)

    def _close(self) -> None:
        """Let the writers end their captures, then stop everything else. Report what is stuck."""
        self._stopping.set()
        for writer in self._writers:
            writer.join(DEADLINE)
        if any(writer.is_alive() for writer in self._writers) or not self._ring.drain(DEADLINE):
            self._trouble("rows were not acknowledged in time")
        self._shippers.stop()
        self._ring.close()  # which wakes writers waiting for room
        status = self._store.stop()
        if status:
            self._trouble(f"the store ended with {status}")
        self._store.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: 600)")
    parser.add_argument("--rounds", type=int, help="stop after this many kills, if that is sooner")
    parser.add_argument("--seed", type=int, default=None, help="seed for the choice of victims and moments")
    parser.add_argument("--shippers", type=int, default=2)
    parser.add_argument("--writers", type=int, default=3, help="captures that are written at once")
    parser.add_argument("--shards", type=int, help="of the store (default: the store's own)")
    parser.add_argument("--shared-memory", choices=("auto", "off"), default="auto", help="of the store (default: auto)")
    parser.add_argument("--victims", default=",".join(VICTIMS), help=f"some of: {', '.join(VICTIMS)}")
    options = parser.parse_args(arguments)
    victims = [word.strip() for word in options.victims.split(",")]
    if not set(victims) <= set(VICTIMS):
        parser.error(f"--victims: some of {', '.join(VICTIMS)}")
    configure_logs("critical")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, so that no process is left
    seed = options.seed if options.seed is not None else random.randrange(1 << 16)
    print(f"seed {seed}, {options.seconds:g} s, {options.shippers} shippers, {options.writers} writers", flush=True)
    with tempfile.TemporaryDirectory(prefix="residuum-soak-") as folder:
        soak = Soak(
            Path(folder),
            seed=seed,
            victims=victims,
            shippers=options.shippers,
            writers=options.writers,
            shards=options.shards,
            shared_memory=options.shared_memory,
        )
        tally = soak.run(seconds=options.seconds, rounds=options.rounds, show=True)
    print(tally)
    print("OK" if tally.clean else "FAILED")
    return 0 if tally.clean else 1


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]  # the supervisor's children inherit it
    sys.exit(main())
