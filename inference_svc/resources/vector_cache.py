"""The steering vectors that clients have sent: kept in host memory, under their digests."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes
from residuum.wire.dtypes import dtype_name
from residuum.wire.limits import DIGEST_BYTES, MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def cache_capacity(max_vectors: int, max_mib: int, hidden_size: int) -> int:
    """Return how many vectors are kept, within a number and within an amount of memory in MiB; at least one."""
    return max(1, min(max_vectors, (max_mib << 20) // (4 * hidden_size)))


def vector_name(tenant: str, digest: bytes) -> bytes:
    """Return what a vector is called here: its digest, after the name of its tenant unless that is the default one.

    So nobody learns, by asking or by how long something takes, whether another tenant has a vector.
    """
    return b"%s/%s" % (tenant.encode(), digest) if tenant else digest


def digest_in(name: bytes) -> bytes:
    """Return the digest of a `vector_name`."""
    return name[-DIGEST_BYTES:]


class VectorCache:
    """Vectors on the host, under their names. Equal vectors from any number of a tenant's clients are one entry."""

    def __init__(self, capacity: int, hidden_size: int, is_leased: Callable[[bytes], bool]) -> None:
        """Make an empty cache.

        Args:
            capacity: Vectors that are kept.
            hidden_size: Elements of each.
            is_leased: Tells of a name whether its vector must not be dropped.
        """
        self._capacity = capacity
        self._hidden_size = hidden_size
        self._is_leased = is_leased
        self._values: dict[bytes, bytes] = {}
        # The names, those that were not used for longest first: all of them, and by the tenant that they begin with.
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._orders: dict[bytes, OrderedDict[bytes, None]] = {}

    @property
    def num_vectors(self) -> int:
        """How many vectors are kept."""
        return len(self._values)

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Return those that are not here, each once, in their order. Those that are here count as used now."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name in self._values:
                self._touch(name)
        return [name for name in wanted if name not in self._values]

    def get(self, name: bytes) -> bytes:
        """Return a vector's values, float32 little-endian [hidden].

        Raises:
            KeyError: It is not here.
        """
        return self._values[name]

    def check_number(self, count: int) -> None:
        """Make sure that so many vectors can be here at once: else sending them again and again would never do.

        Raises:
            Failure: They cannot.
        """
        if count > self._capacity:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"The request uses {count} vectors; at most {self._capacity} are kept.",
                limit="max_vectors",
            )

    def put(self, vector: tensor_pb2.Vector, tenant: str = "", max_bytes: int | None = None) -> None:
        """Check a vector and keep it.

        Args:
            vector: The vector.
            tenant: Whose it is.
            max_bytes: What all vectors of the tenant may take; of more, the one that it did not use for longest goes.

        Raises:
            Failure: It is not what it says it is, does not fit the model, or there is no room.
        """
        self._check(vector)
        name = vector_name(tenant, vector.digest)
        self._values.setdefault(name, vector.values)
        self._touch(name)
        allowed = None if max_bytes is None else max_bytes // (4 * self._hidden_size)
        own = self._orders[_owner(name)]
        if allowed is not None and len(own) > allowed:
            self._evict(name, own, _quota(max_bytes or 0))
        if len(self._values) > self._capacity:
            self._evict(name, self._order, self._no_room())

    def check_direction(self, name: bytes) -> None:
        """Make sure that a vector that is here has a direction which float32 can tell.

        Raises:
            Failure: It is zero, or so short or so long that squares vanish or overflow.
        """
        norm = float(np.linalg.norm(np.frombuffer(self._values[name], dtype="<f4").astype(np.float64)))
        if not MIN_DIRECTION_NORM <= norm <= MAX_DIRECTION_NORM:
            digest = digest_in(name).hex()
            raise Failure(
                Reason.ERROR_REASON_BAD_VALUES,
                f"The vector {digest} has the norm {norm:g}, and so no direction to ablate, cap or replace; its "
                f"norm must be from {MIN_DIRECTION_NORM:g} to {MAX_DIRECTION_NORM:g}.",
                digest=digest,
            )

    def _touch(self, name: bytes) -> None:
        """Note that a vector is used now."""
        for order in (self._order, self._orders.setdefault(_owner(name), OrderedDict())):
            order[name] = None
            order.move_to_end(name)

    def _evict(self, new: bytes, order: OrderedDict[bytes, None], failure: Failure) -> None:
        """Drop the vector of an order that was not used for longest.

        Those that requests need are used now, so they go to its end: the next one who needs room does not come by them
        again.

        Raises:
            Failure: Requests need all of them; then it is the new one that goes.
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
        del self._values[name], self._order[name]
        own = self._orders[_owner(name)]
        del own[name]
        if not own:
            del self._orders[_owner(name)]

    def _no_room(self) -> Failure:
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"{self._capacity} vectors are kept, and requests need all of them; try again later.",
            limit="max_vectors",
        )

    def _check(self, vector: tensor_pb2.Vector) -> None:
        if len(vector.digest) != DIGEST_BYTES:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"A digest has {DIGEST_BYTES} bytes, not {len(vector.digest)}; see tensor.proto for the rule.",
                digest=vector.digest[:DIGEST_BYTES].hex(),
            )
        name = vector.digest.hex()
        if vector.dtype != tensor_pb2.DATA_TYPE_FLOAT32:
            raise Failure(
                Reason.ERROR_REASON_WRONG_DTYPE,
                f"Send vectors as float32, not {dtype_name(vector.dtype)}.",
                dtype=dtype_name(vector.dtype),
            )
        length, rest = divmod(len(vector.values), 4)
        if length != self._hidden_size or rest:
            raise Failure(
                Reason.ERROR_REASON_WRONG_LENGTH,
                f"The vector has {len(vector.values) / 4:g} elements; the model's hidden size is {self._hidden_size}.",
                length=length,
                hidden_size=self._hidden_size,
            )
        if digest_of_bytes(vector.dtype, vector.values) != vector.digest:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"The values do not have the digest {name}; see tensor.proto for the rule.",
                digest=name,
            )
        if not np.isfinite(np.frombuffer(vector.values, dtype="<f4")).all():
            raise Failure(Reason.ERROR_REASON_BAD_VALUES, f"The vector {name} holds NaN or infinity.", digest=name)


def _owner(name: bytes) -> bytes:
    return name[:-DIGEST_BYTES]


def _quota(max_bytes: int) -> Failure:
    return Failure(
        Reason.ERROR_REASON_QUOTA_EXCEEDED,
        f"The vectors of your tenant may take {max_bytes} bytes, and its requests need all that are there; try again "
        "when some have ended, or use fewer.",
        limit="max_vector_bytes",
        allowed=max_bytes,
    )


def missing_vectors(names: Sequence[bytes]) -> Failure:
    """Return the failure that asks a client to send vectors."""
    named = ",".join(digest_in(name).hex() for name in names[:64])
    return Failure(
        Reason.ERROR_REASON_MISSING_VECTORS,
        f"{len(names)} of the request's vectors are not on the server; send them with PutVectors and call again.",
        digests=named,
    )
