"""The encoders of sparse autoencoders that clients have sent. Workers hold them; the service counts their memory.

An upload goes through a file: the workers read it on a thread of their own, so no step waits for hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from inference_svc.resources.vector_cache import digest_in, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.limits import DIGEST_BYTES
from residuum.wire.sae import NO_ACTIVATION, EncoderShape, SAEHeaderError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from residuum.v1 import capture_pb2, sae_pb2

    Keep = Callable[[Sequence[tuple[str, bytes, str]]], Awaitable[Sequence[bool | str]]]

_POLL_SECONDS = 0.01
"""How often the service asks the workers whether an encoder is loaded. They answer between two steps."""

_CHECKED_BYTES = 16 << 20
"""How much of a file is checked for finite numbers at once."""

HOW_TO_ENABLE = "Ask its operator to set --sae-mib."


@dataclass(frozen=True)
class _Kept:
    header: bytes
    shape: EncoderShape


def sae_name(tenant: str, digest: bytes) -> str:
    """Return the name of an encoder in plans and in the workers."""
    return vector_name(tenant, digest).hex()


class SAEMemory:
    """The encoders in the workers, by `vector_name`. Used on one event loop, without locks."""

    def __init__(self, max_bytes: int, widths: Sequence[int], is_leased: Callable[[bytes], bool], keep: Keep) -> None:
        """Start without encoders.

        Args:
            max_bytes: Most bytes of encoders; 0: the server takes none.
            widths: The elements that rows may have.
            is_leased: Returns whether a request needs the encoder of a name, so that it must not be dropped.
            keep: Makes every worker keep these encoders and no others; see `SAECache.keep`.
        """
        self._max_bytes = max_bytes
        self._widths = tuple(widths)
        self._is_leased = is_leased
        self._keep = keep
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # least recently used first
        self._arriving: dict[bytes, tuple[int, asyncio.Future[None]]] = {}  # the bytes of each, and its end
        self._loading: dict[bytes, tuple[_Kept, str]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that a new encoder can have, counting those of encoders that no request needs."""
        needed = sum(kept.shape.nbytes for name, kept in self._kept.items() if self._is_leased(name))
        return self._max_bytes - needed - sum(size for size, _ in self._arriving.values())

    def check(self, tenant: str, spec: capture_pb2.CaptureSpec, widths: Sequence[int]) -> None:
        """Check that the encoder of a capture is here and fits it. It counts as used now.

        Args:
            tenant: The tenant of the request.
            spec: The checked capture.
            widths: The elements of the rows that it captures.

        Raises:
            Failure: MISSING_SAE; or the encoder has another width or another number of features.
        """
        asked = spec.encoding_options.sae
        shape = self.shape_of(tenant, asked.digest)
        if shape.activation == NO_ACTIVATION:
            raise _invalid(
                "capture.encoding_options.sae.digest",
                f"The encoder {asked.digest.hex()} has no activation: it is the map of a lens, which Unembed takes. "
                "Name a sparse autoencoder.",
            )
        if shape.features != asked.features:
            raise _invalid(
                "capture.encoding_options.sae.features",
                f"capture.encoding_options.sae.features is {asked.features}, but the encoder has "
                f"{shape.features} features.",
            )
        other = next((width for width in widths if width != shape.width), None)
        if other is not None:
            raise _wrong_width(asked.digest, shape.width, (other,))

    def shape_of(self, tenant: str, digest: bytes) -> EncoderShape:
        """Return the shape of an encoder, which counts as used now.

        Raises:
            Failure: MISSING_SAE.
        """
        name = vector_name(tenant, digest)
        if name not in self._kept:
            raise _missing(digest)
        self._kept.move_to_end(name)
        return self._kept[name].shape

    async def put(
        self, messages: AsyncIterator[inference_pb2.PutSAERequest], tenant: str
    ) -> inference_pb2.PutSAEResponse:
        """Receive an encoder and have the workers load it.

        Raises:
            Failure: See PutSAE in inference.proto.
        """
        try:
            return await self._put(messages, tenant)
        finally:
            # Some versions of gRPC lose the answer to a call that still sends.
            await _drain(messages, self._max_bytes)

    async def _put(
        self, messages: AsyncIterator[inference_pb2.PutSAERequest], tenant: str
    ) -> inference_pb2.PutSAEResponse:
        first = await anext(messages, inference_pb2.PutSAERequest())
        if first.WhichOneof("part") != "header":
            raise _invalid("header", "The first message of PutSAE must be the header of the encoder.")
        shape = self._check_header(first.header)
        name = vector_name(tenant, first.header.digest)
        existed = name in self._kept
        if not existed and name in self._arriving:
            await asyncio.shield(self._arriving[name][1])  # another call sends the same
            existed = True
        if not existed:
            await self._receive(name, first.header, shape, messages)
        self._kept.move_to_end(name)
        return inference_pb2.PutSAEResponse(existed=existed, num_bytes=shape.nbytes, free_bytes=max(self.free_bytes, 0))

    def _check_header(self, header: sae_pb2.SAEHeader) -> EncoderShape:
        if not self._max_bytes:
            raise _invalid("header", f"This server takes no sparse autoencoders. {HOW_TO_ENABLE}")
        if len(header.digest) != DIGEST_BYTES:
            raise _invalid("header.digest", f"The digest has {len(header.digest)} bytes, not {DIGEST_BYTES}.")
        try:
            shape = EncoderShape.of(header)
        except SAEHeaderError as error:
            raise _invalid("header", f"The header is inconsistent: {error}.") from None
        if shape.width not in self._widths:
            raise _wrong_width(header.digest, shape.width, self._widths)
        return shape

    async def _receive(
        self,
        name: bytes,
        header: sae_pb2.SAEHeader,
        shape: EncoderShape,
        messages: AsyncIterator[inference_pb2.PutSAERequest],
    ) -> None:
        self._make_room(shape.nbytes)
        end = asyncio.get_running_loop().create_future()
        end.add_done_callback(lambda end: end.cancelled() or end.exception())  # nobody may wait for it
        self._arriving[name] = shape.nbytes, end
        try:
            with tempfile.NamedTemporaryFile(prefix="residuum-sae-") as file:
                await _spool(messages, header, shape, Path(file.name))
                await self._load(name, _Kept(header.SerializeToString(), shape), file.name)
        except BaseException as error:
            is_failure = isinstance(error, Failure)
            end.set_exception(error if is_failure else _not_received())
            raise
        finally:
            del self._arriving[name]
        end.set_result(None)

    def _make_room(self, size: int) -> None:
        """Drop encoders that no request needs, least recently used first, until `size` bytes are free.

        Raises:
            Failure: They cannot be.
        """
        if size > self.free_bytes:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"The encoder takes {size} bytes, and {max(self.free_bytes, 0)} of the server's {self._max_bytes} "
                "bytes for encoders are left: registered and running requests need the others, or they are being sent. "
                "Use 16-bit weights or fewer features, try again when requests have ended, or ask the operator to "
                "raise --sae-mib.",
                limit="sae_bytes",
            )
        total = sum(kept.shape.nbytes for kept in self._kept.values())
        total += sum(arriving for arriving, _ in self._arriving.values())
        for name in [name for name in self._kept if not self._is_leased(name)]:
            if total + size <= self._max_bytes:
                return
            total -= self._kept.pop(name).shape.nbytes

    async def _load(self, name: bytes, kept: _Kept, path: str) -> None:
        """Wait until every worker has an encoder.

        Raises:
            Failure: A worker cannot load it.
        """
        self._loading[name] = kept, path
        try:
            while not await self._is_loaded(name):  # noqa: ASYNC110 - it asks other processes
                await asyncio.sleep(_POLL_SECONDS)
            self._kept[name] = kept
        finally:
            del self._loading[name]

    async def _is_loaded(self, name: bytes) -> bool:
        wanted = {key: (kept.header, "") for key, kept in self._kept.items()}
        wanted |= {key: (kept.header, path) for key, (kept, path) in self._loading.items()}
        answers = await self._keep([(key.hex(), header, path) for key, (header, path) in wanted.items()])
        state = dict(zip(wanted, answers, strict=True))[name]
        if isinstance(state, str):
            raise Failure(
                Reason.ERROR_REASON_INTERNAL,
                f"A worker could not load the encoder {digest_in(name).hex()} ({state}); its log says why. If device "
                "memory is short, ask the operator for a smaller KV cache.",
            )
        return state


async def _spool(
    messages: AsyncIterator[inference_pb2.PutSAERequest], header: sae_pb2.SAEHeader, shape: EncoderShape, path: Path
) -> None:
    """Write the bytes of an encoder to a file, and check them.

    Raises:
        Failure: They are more or fewer than the header says, do not match the digest, or are not finite.
    """
    sha, size = shape.begin_digest(), 0

    def add(piece: bytes) -> None:
        sha.update(piece)
        file.write(piece)

    with path.open("wb") as file:
        async for message in messages:
            size += len(message.data)
            if message.WhichOneof("part") != "data" or size > shape.nbytes:
                break
            await asyncio.to_thread(add, message.data)
    if not size:
        raise _missing(header.digest)
    if size != shape.nbytes:
        raise _invalid(
            "data",
            f"The encoder's bytes are {'more' if size > shape.nbytes else f'only {size}, fewer'} than the "
            f"{shape.nbytes} that the header says.",
        )
    if sha.digest() != header.digest:
        raise Failure(
            Reason.ERROR_REASON_DIGEST_MISMATCH,
            f"The bytes do not have the digest {header.digest.hex()}. sae.proto says how to compute it.",
            digest=header.digest.hex(),
        )
    if not await asyncio.to_thread(_is_finite, path, shape):
        raise Failure(
            Reason.ERROR_REASON_BAD_VALUES,
            f"The encoder {header.digest.hex()} holds NaN or infinity. Send finite values.",
            digest=header.digest.hex(),
        )


def _is_finite(path: Path, shape: EncoderShape) -> bool:
    parts = (
        (numpy_dtype(shape.dtype), 0, shape.weight_bytes),
        (np.dtype("<f4"), shape.weight_bytes, shape.nbytes),
    )
    with path.open("rb") as file:
        for dtype, start, end in parts:
            file.seek(start)
            for first in range(start, end, _CHECKED_BYTES):
                piece = file.read(min(_CHECKED_BYTES, end - first))
                if not np.isfinite(np.frombuffer(piece, dtype=dtype)).all():
                    return False
    return True


async def _drain(messages: AsyncIterator[inference_pb2.PutSAERequest], max_bytes: int) -> None:
    """Read what a call still sends, up to `max_bytes`."""
    size = 0
    async for message in messages:
        size += len(message.data)
        if size > max_bytes:
            return


def _missing(digest: bytes) -> Failure:
    return Failure(
        Reason.ERROR_REASON_MISSING_SAE,
        f"The sparse autoencoder {digest.hex()} is not on the server. Send its encoder with PutSAE, then call again.",
        digest=digest.hex(),
    )


def _invalid(field: str, message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_INVALID_FIELD, message, field=field)


def _wrong_width(digest: bytes, width: int, rows: Sequence[int]) -> Failure:
    return Failure(
        Reason.ERROR_REASON_WRONG_LENGTH,
        f"The encoder {digest.hex()} takes rows of {width} elements, but the rows that it is for have "
        f"{' or '.join(map(str, rows))}. Use an autoencoder of this model and site.",
        length=width,
        width=rows[0],
    )


def _not_received() -> Failure:
    return Failure(
        Reason.ERROR_REASON_LIMIT_REACHED,
        "Another call was sending the same encoder and broke off. Send it again.",
        limit="sae_uploads",
    )
