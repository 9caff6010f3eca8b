"""The steering vectors that clients have sent: kept in host memory, under their digests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes
from residuum.wire.dtypes import dtype_name
from residuum.wire.limits import DIGEST_BYTES, MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

BY_PUT_VECTORS = "Send them with PutVectors, then call again."
"""How a client of the gRPC service sends missing vectors."""

_FLOAT_BYTES = 4

_NAMED_DIGESTS = 64
"""Most digests that an error names."""


def cache_capacity(max_vectors: int, max_mib: int, hidden_size: int) -> int:
    """Return how many vectors of the hidden size a cache keeps: limited by number and memory, but at least one."""
    return max(1, min(max_vectors, (max_mib << 20) // (4 * hidden_size)))


OPERATOR = "operator:"
"""The owner of the vectors of the operator's rules. No tenant can have this name."""


def vector_name(tenant: str, digest: bytes) -> bytes:
    """Return the key of a vector in the cache: `tenant/digest`, or only the digest for the default tenant.

    Tenants share no keys. Neither an answer nor its timing tells a tenant whether another one has a vector.
    """
    return b"%s/%s" % (tenant.encode(), digest) if tenant else digest


def digest_in(name: bytes) -> bytes:
    """Return the digest of a `vector_name`."""
    return name[-DIGEST_BYTES:]


def owner_of(name: bytes) -> bytes:
    """Return the tenant's prefix of a `vector_name`."""
    return name[:-DIGEST_BYTES]


class VectorCache:
    """Vectors in host memory, by `vector_name`. Equal vectors of one tenant are one entry."""

    def __init__(
        self,
        max_vectors: int,
        max_bytes: int,
        widths: Sequence[int],
        is_leased: Callable[[bytes], bool],
        how_to_send: str = BY_PUT_VECTORS,
    ) -> None:
        """Make an empty cache.

        Args:
            max_vectors: Most vectors that are kept.
            max_bytes: Most bytes of vectors that are kept; at least one vector is.
            widths: The elements that a vector may have, the model's hidden size first.
            is_leased: Returns whether a request needs the vector of a name, so that it must not be dropped.
            how_to_send: A sentence that tells a client how to send missing vectors.
        """
        self._how_to_send = how_to_send
        self._max_vectors = max_vectors
        self._max_bytes = max(max_bytes, _FLOAT_BYTES * max(widths))
        self._widths = tuple(widths)
        self._is_leased = is_leased
        self._values: dict[bytes, bytes] = {}
        self._bytes: Counter[bytes | None] = Counter()  # of all vectors (None), and of each tenant by its prefix
        # Names, least recently used first: of all tenants together, and of each tenant by the prefix of its names.
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._orders: dict[bytes, OrderedDict[bytes, None]] = {}

    @property
    def num_vectors(self) -> int:
        """How many vectors are kept."""
        return len(self._values)

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the names that are not in the cache, each once, in order. The others count as used now."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name in self._values:
                self._touch(name)
        return [name for name in wanted if name not in self._values]

    def get(self, name: bytes) -> bytes:
        """Return a vector's values, float32 little-endian.

        Raises:
            KeyError: It is not in the cache.
        """
        return self._values[name]

    def check_present(self, names: Iterable[bytes]) -> None:
        """Check that vectors are in the cache. Those that are count as used now.

        Raises:
            Failure: MISSING_VECTORS, with the digests of up to 64 missing vectors.
        """
        missing = self.missing(names)
        if missing:
            raise Failure(
                Reason.ERROR_REASON_MISSING_VECTORS,
                f"{len(missing)} of the request's vectors are not on the server. {self._how_to_send}",
                digests=",".join(digest_in(name).hex() for name in missing[:_NAMED_DIGESTS]),
            )

    def check_room(self, widths: Collection[int], max_bytes: int | None = None) -> None:
        """Check that vectors fit at once. Otherwise a client would send them again and again without success.

        Args:
            widths: The elements of each vector.
            max_bytes: Limit for all vectors of the tenant.

        Raises:
            Failure: They do not fit.
        """
        size = _FLOAT_BYTES * sum(widths)
        if max_bytes is not None and size > max_bytes:
            raise Failure(
                Reason.ERROR_REASON_QUOTA_EXCEEDED,
                f"The request uses {len(widths)} vectors of {size} bytes in total, but the vectors of your tenant may "
                f"take {max_bytes} bytes. Use fewer vectors, or ask the operator for a higher limit.",
                limit="max_vector_bytes",
                needed=size,
                allowed=max_bytes,
            )
        limits = [("max_vectors", len(widths), self._max_vectors), ("max_vector_mib", size, self._max_bytes)]
        for limit, needed, allowed in limits:
            if needed > allowed:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"The request uses {len(widths)} vectors of {size} bytes in total, but the service keeps at most "
                    f"{self._max_vectors} vectors and {self._max_bytes} bytes. Use fewer vectors, or ask the operator "
                    "to raise --max-vectors or --max-vector-mib.",
                    limit=limit,
                    needed=needed,
                    allowed=allowed,
                )

    def check_width(self, name: bytes, width: int, field: str) -> None:
        """Check that a cached vector has as many elements as the rows that it is for. `field` names it in the request.

        Raises:
            Failure: It has another length.
        """
        length = len(self._values[name]) // _FLOAT_BYTES
        if length != width:
            digest = digest_in(name).hex()
            raise Failure(
                Reason.ERROR_REASON_WRONG_LENGTH,
                f"The vector {digest} of {field} has {length} elements, but the rows that it is for have {width}. Use "
                "a vector of that length.",
                length=length,
                width=width,
                field=field,
            )

    def put(self, vector: tensor_pb2.Vector, tenant: str = "", max_bytes: int | None = None) -> None:
        """Check a vector and keep it.

        Args:
            vector: The vector.
            tenant: The tenant that sent it.
            max_bytes: Limit for all vectors of the tenant. Beyond it, the tenant's least recently used one is evicted.

        Raises:
            Failure: Digest, dtype, length or values are wrong, or running requests need all other vectors.
        """
        self._check(vector)
        name = vector_name(tenant, vector.digest)
        owner, is_kept = owner_of(name), name in self._values
        self._touch(name)
        if is_kept:  # it needs no room, also if the tenant's limit is smaller by now
            return
        self._values[name] = vector.values
        self._bytes.update({None: len(vector.values), owner: len(vector.values)})
        while max_bytes is not None and self._bytes[owner] > max_bytes:
            self._evict(name, self._orders[owner], _quota(max_bytes))
        while len(self._values) > self._max_vectors or self._bytes[None] > self._max_bytes:
            self._evict(name, self._order, self._no_room())

    def check_direction(self, name: bytes) -> None:
        """Check that a cached vector has a direction that float32 arithmetic can compute.

        Raises:
            Failure: It is zero, or so short or so long that its squares underflow or overflow.
        """
        norm = float(np.linalg.norm(np.frombuffer(self._values[name], dtype="<f4").astype(np.float64)))
        if not MIN_DIRECTION_NORM <= norm <= MAX_DIRECTION_NORM:
            digest = digest_in(name).hex()
            raise Failure(
                Reason.ERROR_REASON_BAD_VALUES,
                f"The vector {digest} has the norm {norm:g}, so it has no direction to ablate, cap or replace. Send a "
                f"vector whose norm is from {MIN_DIRECTION_NORM:g} to {MAX_DIRECTION_NORM:g}.",
                digest=digest,
            )

    def _touch(self, name: bytes) -> None:
        """Note that a vector is used now."""
        for order in (self._order, self._orders.setdefault(owner_of(name), OrderedDict())):
            order[name] = None
            order.move_to_end(name)

    def _evict(self, new: bytes, order: OrderedDict[bytes, None], failure: Failure) -> None:
        """Drop the least recently used vector of an order that no request needs.

        Needed vectors count as used now and move to the end, so that the next search does not meet them again.

        Raises:
            Failure: Requests need all other vectors. The new vector is dropped.
        """
        for _ in range(len(order)):
            name = next(iter(order))
            if name != new and not self._is_leased(name):
                self._drop(name)
                return
            order.move_to_end(name)
        self._drop(new)
        raise failure

    def _drop(self, name: bytes) -> None:
        owner, size = owner_of(name), len(self._values.pop(name))
        del self._order[name], self._orders[owner][name]
        self._bytes.subtract({None: size, owner: size})
        if not self._orders[owner]:
            del self._orders[owner], self._bytes[owner]

    def _no_room(self) -> Failure:
        too_many = len(self._values) > self._max_vectors
        kept = len(self._values) - 1  # without the new one, for which there is no room
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"The cache is full with {kept} vectors, and running requests need all of them. Try again later, or ask "
            f"the operator to raise {'--max-vectors' if too_many else '--max-vector-mib'}.",
            limit="max_vectors" if too_many else "max_vector_mib",
        )

    def _check(self, vector: tensor_pb2.Vector) -> None:
        if len(vector.digest) != DIGEST_BYTES:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"The digest has {len(vector.digest)} bytes, not {DIGEST_BYTES}. Compute it as tensor.proto says.",
                digest=vector.digest[:DIGEST_BYTES].hex(),
            )
        name = vector.digest.hex()
        if vector.dtype != tensor_pb2.DATA_TYPE_FLOAT32:
            raise Failure(
                Reason.ERROR_REASON_WRONG_DTYPE,
                f"The vector is {dtype_name(vector.dtype)}. Send vectors as float32.",
                dtype=dtype_name(vector.dtype),
            )
        length, rest = divmod(len(vector.values), _FLOAT_BYTES)
        if length not in self._widths or rest:
            raise Failure(
                Reason.ERROR_REASON_WRONG_LENGTH,
                f"The vector has {len(vector.values) / _FLOAT_BYTES:g} elements, but the rows of this model have "
                f"{' or '.join(map(str, self._widths))}. A vector, such as the weights of a probe, must have the "
                "length of the rows that it is for.",
                length=length,
                hidden_size=self._widths[0],
            )
        if digest_of_bytes(vector.dtype, vector.values) != vector.digest:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"The values do not have the digest {name}. Compute it as tensor.proto says, and send both again.",
                digest=name,
            )
        if not np.isfinite(np.frombuffer(vector.values, dtype="<f4")).all():
            raise Failure(
                Reason.ERROR_REASON_BAD_VALUES,
                f"The vector {name} holds NaN or infinity. Send finite values.",
                digest=name,
            )


def _quota(max_bytes: int) -> Failure:
    return Failure(
        Reason.ERROR_REASON_QUOTA_EXCEEDED,
        f"The vectors of your tenant may take {max_bytes} bytes, and your running requests need all of the kept ones. "
        "Try again when some requests have ended, or use fewer vectors.",
        limit="max_vector_bytes",
        allowed=max_bytes,
    )
