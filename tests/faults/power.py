"""Simulates power failures: records every write of a store, and rebuilds its files with any unsynced writes undone.

`strace` records a store's writes to its data files, and its syncs. After a power cut, a disk has all writes to a file
from before its last completed sync, and all completed writes with O_DSYNC. Of later writes it has an arbitrary subset.
`Recording.cut` rebuilds the files as they may be after a cut at any moment. To verify the recording, all writes
together must reproduce the files byte by byte.

This makes LMDB's assumptions about disks: fdatasync keeps its promise, and the few bytes of a root page are not torn.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CALLS = "openat,lseek,write,writev,pwrite64,pwritev,pwritev2,fdatasync,fsync,msync,ftruncate,mmap"
_LONGEST = 4 << 20

_LINE = re.compile(r"(?P<pid>\d+) +(?P<time>\d+\.\d+) (?P<text>.*)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(?P<rest>.*)")
_OPEN = re.compile(r'openat\(.*", (?P<flags>[A-Z_|]+).*\) = (?P<descriptor>\d+)')
_FILE = re.compile(r"\w+\(\d+<(?P<path>[^>]*)>")
_SEEK = re.compile(r"lseek\((?P<descriptor>\d+)<[^>]*>, (?P<at>\d+), SEEK_SET\) += (?P=at)")
_WRITE_AT = re.compile(r'pwrite64\((?P<descriptor>\d+)<[^>]*>, "(?P<data>[^"]*)", \d+, (?P<at>\d+)\) += (?P<done>\d+)')
_WRITE_ON = re.compile(r"writev\((?P<descriptor>\d+)<[^>]*>, \[(?P<parts>.*)\], \d+\) += (?P<done>\d+)")
_PART = re.compile(r'iov_base="([^"]*)"')
_SYNC = re.compile(r"f(?:data)?sync\(\d+<[^>]*>\) += 0")
_HARMLESS = re.compile(r"openat\(.* = -1 |mmap\(.*PROT_READ, MAP_SHARED|\+\+\+|---")


def unavailable(folder: Path) -> str | None:
    """Return why strace cannot be used here; None if it can. The folder is for a log."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    log = folder / "strace.log"
    process = subprocess.Popen([*watched([folder / "nothing"], log), "true"], stderr=subprocess.PIPE, text=True)
    _, error = process.communicate()
    return None if process.returncode == 0 and has_ended(log, process.pid) else f"strace is not permitted: {error}"


def has_ended(log: Path, pid: int, deadline: float = 20.0) -> bool:
    """Wait until a log is complete: strace records the process's end slightly after it."""
    end = time.monotonic() + deadline
    last_words = re.compile(rf"^{pid} .*\+\+\+ (exited|killed)", re.MULTILINE)
    while not (log.exists() and last_words.search(log.read_text())):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def watched(files: Sequence[Path], log: Path) -> list[str]:
    """Return the command prefix that records writes to files. The process keeps the PID of the command."""
    only = [word for file in files for word in ("-P", str(file))]
    options = ["-D", "-f", "-q", "-ttt", "-y", "-xx", "-s", str(_LONGEST), "-e", f"trace={_CALLS}", "-o", str(log)]
    return ["strace", *options, *only]


@dataclass(frozen=True)
class Write:
    """A write of bytes."""

    time: float
    """When the call began."""
    file: Path
    at: int
    data: bytes
    durable: bool
    """Whether it had reached the disk when the call returned."""


@dataclass(frozen=True)
class Sync:
    """A sync: everything that was written to the file before it is on the disk."""

    time: float
    file: Path


class Recording:
    """All changes to data files by successive processes, in the order in which the calls returned."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self.events: list[Write | Sync] = []
        for log in logs:
            self.events += _parse(log)

    def moments(self, since: float) -> Iterator[int]:
        """Yield every moment of a power cut: before each event, and after the last one."""
        yield from (at for at, event in enumerate(self.events) if event.time >= since)
        yield len(self.events)

    def time(self, moment: int) -> float:
        """Return the time of a moment. Anything acknowledged before it must survive."""
        return self.events[moment].time if moment < len(self.events) else float("inf")

    def cut(self, moment: int, keep: Callable[[Write], bool]) -> dict[Path, bytes]:
        """Return the files after a power cut.

        Args:
            moment: When.
            keep: Tells of each unsynced write whether it reached the disk. Threads write files at the same time, so
                these may also be writes that had begun but not returned.
        """
        safe = {event.file: at for at, event in enumerate(self.events[:moment]) if isinstance(event, Sync)}
        now = self.time(moment)

        def survives(at: int, event: Write) -> bool:
            if at < moment and (at < safe.get(event.file, 0) or event.durable):
                return True
            return (at < moment or event.time < now) and keep(event)

        return _images(
            event for at, event in enumerate(self.events) if isinstance(event, Write) and survives(at, event)
        )

    def everything(self) -> dict[Path, bytes]:
        """Return the files with all writes, as the kernel shows them."""
        return _images(event for event in self.events if isinstance(event, Write))


def _images(writes: Iterable[Write]) -> dict[Path, bytes]:
    images: dict[Path, bytearray] = {}
    for write in writes:
        _apply(images.setdefault(write.file, bytearray()), write)
    return {file: bytes(image) for file, image in images.items()}


def _apply(image: bytearray, write: Write) -> None:
    end = write.at + len(write.data)
    if len(image) < end:
        image.extend(bytes(end - len(image)))
    image[write.at : end] = write.data


def _parse(log: Path) -> Iterator[Write | Sync]:
    durable: dict[str, bool] = {}
    position: dict[str, int] = {}
    for began, text in _calls(log):
        if call := _OPEN.match(text):
            durable[call["descriptor"]] = "SYNC" in call["flags"]
        elif call := _SEEK.match(text):
            position[call["descriptor"]] = int(call["at"])
        elif call := _WRITE_AT.match(text):
            yield _write(began, call, int(call["at"]), [call["data"]], durable)
        elif call := _WRITE_ON.match(text):
            write = _write(began, call, position[call["descriptor"]], _PART.findall(call["parts"]), durable)
            position[call["descriptor"]] += len(write.data)
            yield write
        elif _SYNC.match(text):
            yield Sync(began, _file(text))
        else:
            assert _HARMLESS.match(text), f"a call that this simulation does not know: {text[:200]}"


def _write(began: float, call: re.Match[str], at: int, parts: Sequence[str], durable: dict[str, bool]) -> Write:
    data = bytes.fromhex("".join(parts).replace("\\x", ""))
    assert len(data) == int(call["done"]), "a write was incomplete"
    return Write(began, _file(call.string), at, data, durable[call["descriptor"]])


def _file(text: str) -> Path:
    """Return the file of a call, whose path strace writes in hexadecimal."""
    found = _FILE.match(text)
    assert found, text[:200]
    return Path(os.fsdecode(bytes.fromhex(found["path"].replace("\\x", ""))))


def _calls(log: Path) -> Iterator[tuple[float, str]]:
    """Yield the calls in the order in which they ended, with the times at which they began."""
    begun: dict[str, tuple[float, str]] = {}
    for line in log.read_text().splitlines():
        parts = _LINE.match(line)
        assert parts, line[:200]
        pid, began, text = parts["pid"], float(parts["time"]), parts["text"]
        if text.endswith("<unfinished ...>"):
            begun[pid] = began, text.removesuffix("<unfinished ...>")
        elif resumed := _RESUMED.match(text):
            began, start = begun.pop(pid)
            yield began, start.rstrip() + resumed["rest"]
        else:
            yield began, text
