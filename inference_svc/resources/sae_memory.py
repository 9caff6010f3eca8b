"""The encoders of sparse autoencoders that clients have sent. Workers hold them; the service counts their memory.

An upload goes through a file: the workers read it on a thread of their own, so no step waits for hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from inference_svc.resources import sae_upload
from inference_svc.resources.vector_cache import digest_in, owner_of, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.limits import DIGEST_BYTES
from residuum.wire.sae import NO_ACTIVATION, EncoderShape, SAEHeaderError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from residuum.v1 import capture_pb2, sae_pb2

    Keep = Callable[[Sequence[tuple[str, bytes, str, int]]], Awaitable[Sequence[bool | str]]]

_POLL_SECONDS = 0.01
"""How often the service asks the workers whether an encoder is loaded. They answer between two steps."""

_NO_ROOM = "MemoryError"
"""What a worker answers if the free memory for encoders is in pieces, none of which is large enough."""

HOW_TO_ENABLE = "Ask its operator to set --sae-mib."


@dataclass(frozen=True)
class _Kept:
    header: bytes
    shape: EncoderShape


@dataclass(frozen=True)
class _Arriving:
    size: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the upload has ended, in any way."""


def sae_name(tenant: str, digest: bytes) -> str:
    """Return the name of an encoder in plans and in the workers."""
    return vector_name(tenant, digest).hex()


class SAEMemory:
    """The encoders in the workers, by `vector_name`. Used on one event loop, without locks.

    An upload counts from its header on, so that all uploads together fit. But it drops no other encoder before its own
    bytes are here and checked: a header alone costs others nothing.
    """

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
        self._arriving: dict[bytes, _Arriving] = {}
        self._loading: dict[bytes, tuple[_Kept, str, int]] = {}  # the file of each, and the number of its upload
        self._uploads = count(1)

    @property
    def free_bytes(self) -> int:
        """Bytes that a new encoder can have, counting those of encoders that no request needs."""
        return self._max_bytes - self._needed()

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
            raise sae_upload.missing(digest)
        self._kept.move_to_end(name)
        return self._kept[name].shape

    async def put(
        self, messages: AsyncIterator[inference_pb2.PutSAERequest], tenant: str, max_bytes: int | None = None
    ) -> inference_pb2.PutSAEResponse:
        """Receive an encoder and have the workers load it.

        Args:
            messages: The header, then the bytes.
            tenant: The tenant that sends it.
            max_bytes: Limit for all encoders of the tenant. Beyond it, the tenant's least recently used one is dropped.

        Raises:
            Failure: See PutSAE in inference.proto.
        """
        try:
            return await self._put(messages, tenant, max_bytes)
        finally:
            # Some versions of gRPC lose the answer to a call that still sends.
            await sae_upload.drain(messages, self._max_bytes)

    async def _put(
        self, messages: AsyncIterator[inference_pb2.PutSAERequest], tenant: str, max_bytes: int | None
    ) -> inference_pb2.PutSAEResponse:
        first = await anext(messages, inference_pb2.PutSAERequest())
        if first.WhichOneof("part") != "header":
            raise _invalid("header", "The first message of PutSAE must be the header of the encoder.")
        shape = self._check_header(first.header)
        name = vector_name(tenant, first.header.digest)
        existed = True
        while name not in self._kept:  # after a wait it may be gone again, or its upload may have failed
            arriving = self._arriving.get(name)
            if arriving is not None:
                await arriving.ended.wait()  # another call sends the same
                continue
            await self._receive(name, first.header, shape, messages, max_bytes)
            existed = False
        self._kept.move_to_end(name)
        free = self._free_for(name, max_bytes)
        return inference_pb2.PutSAEResponse(existed=existed, num_bytes=shape.nbytes, free_bytes=max(free, 0))

    def _check_header(self, header: sae_pb2.SAEHeader) -> EncoderShape:
        if not self._max_bytes:
            raise _invalid("header", f"This server has no memory for sparse autoencoders and lenses. {HOW_TO_ENABLE}")
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
        max_bytes: int | None,
    ) -> None:
        self._check_room(name, shape.nbytes, max_bytes)
        arriving = self._arriving[name] = _Arriving(shape.nbytes)
        try:
            with sae_upload.spool() as file:
                await sae_upload.receive(messages, header, shape, file)
                self._make_room(name, shape.nbytes, max_bytes)
                kept = _Kept(header.SerializeToString(), shape)
                await self._load(name, kept, sae_upload.path_of(file))
        finally:
            del self._arriving[name]
            arriving.ended.set()

    def _needed(self, owner: bytes | None = None) -> int:
        """Return the bytes of encoders that must stay or that are being sent: of one tenant, or of all."""
        leased = {name: kept.shape.nbytes for name, kept in self._kept.items() if self._is_leased(name)}
        sizes = {name: arriving.size for name, arriving in self._arriving.items()} | leased
        return sum(size for name, size in sizes.items() if owner in (None, owner_of(name)))

    def _free_for(self, name: bytes, max_bytes: int | None) -> int:
        """Return the bytes that another encoder of a tenant can have."""
        if max_bytes is None:
            return self.free_bytes
        return min(self.free_bytes, max_bytes - self._needed(owner_of(name)))

    def _check_room(self, name: bytes, size: int, max_bytes: int | None) -> None:
        """Check that there is room for another encoder if those that no request needs are dropped.

        Raises:
            Failure: There is not.
        """
        if max_bytes is not None and size > max_bytes - self._needed(owner_of(name)):
            raise _over_quota(size, max_bytes)
        if size > self._max_bytes:
            raise self._full(
                f"The encoder takes {size} bytes, and the server has {self._max_bytes} bytes for encoders.",
                needed=size,
                allowed=self._max_bytes,
            )
        if size > self.free_bytes:
            raise self._full(
                f"The encoder takes {size} bytes, and {max(self.free_bytes, 0)} of the server's {self._max_bytes} "
                "bytes for encoders are left: registered and running requests need the others, or they are being sent."
            )

    def _make_room(self, name: bytes, size: int, max_bytes: int | None) -> None:
        """Drop encoders that no request needs, least recently used first, for one that has arrived.

        Those of its own tenant go first, as far as the tenant's limit demands.

        Raises:
            Failure: Requests have come to need too many of the others meanwhile.
        """
        arriving = self._arriving.pop(name)  # not twice
        try:
            self._check_room(name, size, max_bytes)
        finally:
            self._arriving[name] = arriving
        owner = owner_of(name)
        while max_bytes is not None and self._held(owner) + size > max_bytes and self._drop_oldest(owner):
            pass
        while self._held() + size > self._max_bytes and self._drop_oldest():
            pass

    def _held(self, owner: bytes | None = None) -> int:
        """Return the bytes of encoders that the workers have or load: of one tenant, or of all."""
        kept = self._kept | {name: kept for name, (kept, _, _) in self._loading.items()}
        return sum(kept.shape.nbytes for name, kept in kept.items() if owner in (None, owner_of(name)))

    def _drop_oldest(self, owner: bytes | None = None) -> bool:
        """Drop the least recently used encoder, of one tenant or of all, that no request needs.

        Returns:
            Whether there was one.
        """
        for name in self._kept:
            if owner in (None, owner_of(name)) and not self._is_leased(name):
                del self._kept[name]
                return True
        return False

    async def _load(self, name: bytes, kept: _Kept, path: str) -> None:
        """Wait until every worker has an encoder.

        Raises:
            Failure: A worker cannot load it.
        """
        self._loading[name] = kept, path, next(self._uploads)
        try:
            while (state := await self._state(name)) is not True:
                if state == _NO_ROOM and self._drop_oldest():
                    self._loading[name] = kept, path, next(self._uploads)  # workers try each number only once
                    continue
                if state == _NO_ROOM:
                    raise self._full(
                        f"The encoder takes {kept.shape.nbytes} bytes. As many are free, but not in one piece: "
                        "registered and running requests need the encoders in between."
                    )
                if isinstance(state, str):
                    raise _not_loaded(name, state)
                await asyncio.sleep(_POLL_SECONDS)
            self._kept[name] = kept
        finally:
            del self._loading[name]

    async def _state(self, name: bytes) -> bool | str:
        wanted = {key: (kept.header, "", 0) for key, kept in self._kept.items()}
        wanted |= {key: (kept.header, path, upload) for key, (kept, path, upload) in self._loading.items()}
        answers = await self._keep([(key.hex(), *item) for key, item in wanted.items()])
        return dict(zip(wanted, answers, strict=True))[name]

    def _full(self, message: str, **sizes: int) -> Failure:
        later = "" if sizes else "try again when requests have ended, "
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"{message} Use 16-bit weights or fewer features, {later}or ask the operator to raise --sae-mib.",
            limit="sae_bytes",
            **sizes,
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
        encoder=digest.hex(),
    )


def _over_quota(size: int, max_bytes: int) -> Failure:
    return Failure(
        Reason.ERROR_REASON_QUOTA_EXCEEDED,
        f"The encoder takes {size} bytes. The encoders of your tenant may take {max_bytes} bytes, and your registered "
        "and running requests need some of them, or they are being sent. Use 16-bit weights or fewer features, or try "
        "again when requests have ended.",
        limit="max_sae_bytes",
        allowed=max_bytes,
    )


def _not_loaded(name: bytes, cause: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"A worker could not load the encoder {digest_in(name).hex()} ({cause}); its log says why. If device memory is "
        "short, ask the operator for a smaller KV cache.",
    )
