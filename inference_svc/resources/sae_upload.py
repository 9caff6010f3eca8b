"""Receiving an encoder: its bytes go to a file without a name, and are checked."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from residuum.rpc.errors import Failure, Reason
from residuum.wire.dtypes import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from residuum.v1 import inference_pb2, sae_pb2
    from residuum.wire.sae import EncoderShape

_T = TypeVar("_T")

IDLE_SECONDS = 30.0
"""How long the next message of an upload may take."""

SLOWEST_BYTES_PER_SECOND = 1e6
"""An upload may take `IDLE_SECONDS` more than at this speed. A slower one would keep its room from others for long."""

LONGEST_SECONDS = 900.0
"""No upload may take longer than this, however large it is."""

_CHECKED_BYTES = 16 << 20
"""How much of a file is checked for finite numbers at once."""


def spool() -> IO[bytes]:
    """Open a temporary file without a name, so that nothing is left of it if the service is killed.

    Raises:
        Failure: It cannot be made.
    """
    try:
        return tempfile.TemporaryFile(prefix="residuum-sae-", buffering=0)
    except OSError as error:
        raise _unwritable(error) from error


def path_of(file: IO[bytes]) -> str:
    """Return a path by which other processes of this machine can open a file without a name."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


async def receive(
    messages: AsyncIterator[inference_pb2.PutSAERequest],
    header: sae_pb2.SAEHeader,
    shape: EncoderShape,
    file: IO[bytes],
) -> None:
    """Write the bytes of an encoder to a file, and check them.

    Raises:
        Failure: They are more or fewer than the header says, do not match the digest, or are not finite. Or they stop
            coming, or cannot be written.
    """
    sha, size = shape.begin_digest(), 0
    deadline = _Deadline(min(IDLE_SECONDS + shape.nbytes / SLOWEST_BYTES_PER_SECOND, LONGEST_SECONDS))

    def add(piece: bytes) -> None:
        sha.update(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[file.write(rest) :]

    while (message := await _next(messages, deadline)) is not None:
        size += len(message.data)
        if not message.data or size > shape.nbytes:
            break
        try:
            await _in_thread(add, message.data)
        except OSError as error:
            raise _unwritable(error) from error
    if not size:
        raise missing(header.digest)
    if size != shape.nbytes:
        raise Failure(
            Reason.ERROR_REASON_INVALID_FIELD,
            f"The encoder's bytes are {'more' if size > shape.nbytes else f'only {size}, fewer'} than the "
            f"{shape.nbytes} that the header says.",
            field="data",
        )
    if sha.digest() != header.digest:
        raise Failure(
            Reason.ERROR_REASON_DIGEST_MISMATCH,
            f"The bytes do not have the digest {header.digest.hex()}. sae.proto says how to compute it.",
            digest=header.digest.hex(),
        )
    if not await _in_thread(_is_finite, file, shape):
        raise Failure(
            Reason.ERROR_REASON_BAD_VALUES,
            f"The encoder {header.digest.hex()} holds NaN or infinity. Send finite values.",
            digest=header.digest.hex(),
        )


async def drain(messages: AsyncIterator[inference_pb2.PutSAERequest], max_bytes: int) -> None:
    """Read what a call still sends, up to `max_bytes` and for `IDLE_SECONDS`. Until then it keeps its call slot."""
    size, deadline = 0, _Deadline(IDLE_SECONDS)
    try:
        while size <= max_bytes and (message := await _next(messages, deadline)) is not None:
            size += len(message.data)
    except Failure:
        return


def missing(digest: bytes) -> Failure:
    """Return the failure of a call that needs an encoder that is not on the server."""
    return Failure(
        Reason.ERROR_REASON_MISSING_SAE,
        f"The sparse autoencoder {digest.hex()} is not on the server. Send its encoder with PutSAE, then call again.",
        digest=digest.hex(),
    )


async def _in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread, and wait for its end also if the caller leaves.

    Otherwise the file could be closed while the thread writes to it, and the write could reach another file that gets
    the same number.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


class _Deadline:
    """When an upload that begins now must have ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


async def _next(
    messages: AsyncIterator[inference_pb2.PutSAERequest], deadline: _Deadline
) -> inference_pb2.PutSAERequest | None:
    """Return the next message; None after the last one.

    Raises:
        Failure: It does not come in time.
    """
    left = deadline.left()
    try:
        return await asyncio.wait_for(anext(messages), max(min(IDLE_SECONDS, left), 0.0))
    except StopAsyncIteration:
        return None
    except asyncio.TimeoutError:
        problem = (
            f"The next message of the upload did not arrive within {IDLE_SECONDS:g} s"
            if left > IDLE_SECONDS
            else f"The upload did not end within {deadline.seconds:.3g} s, which is the limit for its size"
        )
        raise Failure(
            Reason.ERROR_REASON_CALLER_STALLED,
            f"{problem}, so the service ended it and kept nothing. Send the encoder again.",
        ) from None


def _unwritable(error: OSError) -> Failure:
    return Failure(
        Reason.ERROR_REASON_LIMIT_REACHED,
        f"The service cannot write the encoder to a file in {tempfile.gettempdir()}: {os.strerror(error.errno or 0)}. "
        "Try again later, or ask its operator for more room there (TMPDIR chooses another folder).",
        limit="temporary_files",
    )


def _is_finite(file: IO[bytes], shape: EncoderShape) -> bool:
    parts = (
        (numpy_dtype(shape.dtype), 0, shape.weight_bytes),
        (np.dtype("<f4"), shape.weight_bytes, shape.nbytes),
    )
    for dtype, start, end in parts:
        for first in range(start, end, _CHECKED_BYTES):
            piece = os.pread(file.fileno(), min(_CHECKED_BYTES, end - first), first)
            if not np.isfinite(np.frombuffer(piece, dtype=dtype)).all():
                return False
    return True
