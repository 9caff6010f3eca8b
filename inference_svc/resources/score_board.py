"""The score board: shared memory from which the service reads the scores that the workers write.

`taps/scores.py` is the workers' side. Each sequence whose rows are scored has a region, with a line for each position.
Before its request runs, the region is filled with a mark, a NaN that no computation returns, so the service sees which
scores have arrived.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from inference_svc.shipping.free_runs import FreeRuns
from inference_svc.taps.plan import ScoreRegion
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_MISSING = np.uint32(0x7FC0DEAD)
"""The bits of an element that has not arrived."""
_MISSING_BYTES = _MISSING.tobytes()

_REST_SECONDS = 5.0
"""How long a region is not used again. Steps that the engine had begun when the request ended may still write to it.
Even a later write does no harm: the engine runs its steps in order, so the region's next owner writes after it, and its
token comes after that."""

_ARRIVAL_SECONDS = 10.0
"""How long a token waits for its scores before the request fails. They are there before the token."""
_POLL_SECONDS = 0.001

_SCORE_BYTES = 4
_RAISE = "raise score-mib (--score-mib, RESIDUUM_SCORE_MIB)"


def _kib(scores: int) -> str:
    """Return the memory of scores for a message."""
    return f"{scores * _SCORE_BYTES / 1024:.1f}"


class ScoreMemory:
    """Memory for scores, which other processes of the same user can open."""

    def __init__(self, num_bytes: int) -> None:
        """Make memory of this size."""
        self._fd = os.memfd_create("residuum-scores", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self.numbers: npt.NDArray[np.float32] = np.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=np.float32)

    @property
    def path(self) -> str:
        """Where other processes find it, for as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


class ScoreBoard:
    """The memory, and which parts of it are in use. Only one event loop uses it."""

    def __init__(
        self,
        memory: ScoreMemory | npt.NDArray[np.float32],
        clock: Callable[[], float] = time.monotonic,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Use the memory.

        Args:
            memory: It, or its numbers as another process shares them.
            clock: Returns monotonic seconds.
            share: The index of this process, and how many there are: each uses its own part.
        """
        self._clock = clock
        self._memory = memory  # which stays open for as long as this
        self._numbers = memory.numbers if isinstance(memory, ScoreMemory) else memory
        self._bits = self._numbers.view(np.uint32)
        index, count = share
        self._size = len(self._numbers) // count
        self._first = index * self._size
        self._free = FreeRuns(self._size)
        self._resting: deque[tuple[float, ScoreRegion]] = deque()

    def check_size(self, size: int, of_prompt: int) -> None:
        """Check that the scores of a request fit if no other request has any.

        Args:
            size: The scores of all its sequences.
            of_prompt: How many of them are there only because of the prompt's length.

        Raises:
            Failure: They do not fit.
        """
        if size > self._size:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"The scores of the request need {_kib(size)} KiB, {_kib(of_prompt)} of them for the prompt, but the "
                f"server has {_kib(self._size)} KiB in total. Generate fewer tokens or sequences, use "
                f"{'a shorter prompt or ' if of_prompt else ''}fewer outputs, or ask the operator to {_RAISE}.",
                limit="score_mib",
                needed=size * _SCORE_BYTES,
                allowed=self._size * _SCORE_BYTES,
                needed_by_prompt=of_prompt * _SCORE_BYTES,
            )

    def take(self, first_position: int, positions: int, columns: int) -> ScoreRegion:
        """Return a region for the scores of a sequence.

        Raises:
            Failure: There is no room now.
        """
        while self._resting and self._resting[0][0] <= self._clock():
            _, region = self._resting.popleft()
            self._free.give_back(region.offset - self._first, region.positions * region.columns)
        size = positions * columns
        place = self._free.take(size)
        if place is None:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"The scores of a sequence need {_kib(size)} KiB, and the server has {_kib(self._free.total)} of "
                f"{_kib(self._size)} KiB free. Other requests use the rest. Try again later, or ask the operator to "
                f"{_RAISE}.",
                limit="score_mib",
            )
        offset = self._first + place
        self._bits[offset : offset + size] = _MISSING
        return ScoreRegion(offset, first_position, positions, columns)

    def give_back(self, region: ScoreRegion, *, rests: bool = True) -> None:
        """Free a region: some time after the end of its request, unless the engine never knew it."""
        if rests:
            self._resting.append((self._clock() + _REST_SECONDS, region))
        else:
            self._free.give_back(region.offset - self._first, region.positions * region.columns)

    async def read(self, region: ScoreRegion, first: int, count: int) -> npt.NDArray[np.float32]:
        """Return the scores of positions, float32 [count, columns], once they have arrived.

        Raises:
            Failure: They have not arrived in time.
        """
        start = region.offset + (first - region.first_position) * region.columns
        part = slice(start, start + count * region.columns)
        found = self._arrived(part)
        if found is None:
            found = await self._arrival(part, first, count)
        return found.reshape(count, region.columns)

    async def _arrival(self, part: slice, first: int, count: int) -> npt.NDArray[np.float32]:
        """Wait until elements have arrived, and return them. Raises a Failure if they do not."""
        deadline = self._clock() + _ARRIVAL_SECONDS
        while (found := self._arrived(part)) is None:
            if self._clock() > deadline:
                raise Failure(
                    Reason.ERROR_REASON_INTERNAL,
                    f"The scores of the positions {first} to {first + count - 1} did not arrive from the engine. This "
                    "is a defect of residuum: please report it.",
                )
            await asyncio.sleep(_POLL_SECONDS)
        return found

    def _arrived(self, part: slice) -> npt.NDArray[np.float32] | None:
        """Return a copy of elements, read-only; None if some have not arrived."""
        data = self._numbers[part].tobytes()
        found: npt.NDArray[np.float32] = np.frombuffer(data, dtype=np.float32)
        # To look for the bytes takes a fraction of a comparison, for few elements. Neighbours may contain them, too.
        if _MISSING_BYTES in data and (found.view(np.uint32) == _MISSING).any():
            return None
        return found
