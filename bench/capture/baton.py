"""Lets processes that run at the same time measure in turns, so that all meet the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.002
_DROPPED = ".dropped"
"""The end of the name of a file that only exists if a process has failed."""


class BatonDroppedError(RuntimeError):
    """Another of the processes failed, so this one's measurements have nothing to be compared with."""


@dataclass(frozen=True)
class Baton:
    """One process's hold on a file that says whose turn it is. A process alone needs no file."""

    file: str = ""
    place: int = 0
    """The process's place among the members in even turns. In odd ones the order is reversed."""
    members: int = 1

    def lay_down(self) -> None:
        """Make the file, before any process starts."""
        Path(self.file).write_text("0")

    def drop(self) -> None:
        """End all waits for a turn: a process has failed."""
        Path(self.file + _DROPPED).touch()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait for a turn of this process, numbered from 0, and pass the baton on when the context ends.

        Raises:
            BatonDroppedError: Another process failed.
        """
        if not self.file:
            yield
            return
        place = self.place if number % 2 == 0 else self.members - 1 - self.place
        own = number * self.members + place
        while not _is_turn(self.file, own):  # noqa: ASYNC110 - the turn comes from another process
            await asyncio.sleep(_POLL_SECONDS)
        yield
        _pass_on(Path(self.file), own + 1)


def _is_turn(file: str, turn: int) -> bool:
    if Path(file + _DROPPED).exists():
        raise BatonDroppedError("Another process of this round failed. Its error follows.")
    return Path(file).read_text() == str(turn)


def _pass_on(file: Path, turn: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(str(turn))
    new.replace(file)  # others read the file at any time
