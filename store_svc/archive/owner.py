"""An archive belongs to one store. A second one would overwrite and delete what the first one keeps there."""

from __future__ import annotations

import secrets

from residuum.rpc.objects import ArchiveRefusedError, MissingObjectError, Objects
from residuum.v1 import archive_pb2
from residuum.wire.rows.archive import CAPTURES, OWNER, PROBE, LayoutError, pack, unpack_owner


def read_owner(objects: Objects) -> bytes | None:
    """Return the ID of the store that an archive belongs to; None if it belongs to none.

    Raises:
        ArchiveError: It cannot be read.
    """
    try:
        return bytes(unpack_owner(objects.get(OWNER)).store_id)
    except MissingObjectError:
        return None
    except LayoutError as error:
        raise ArchiveRefusedError(
            f"the object {OWNER!r} in {objects.url} is not of a store's archive: {error}"
        ) from None


def claim(objects: Objects, store_id: bytes, *, was_claimed: bool) -> None:
    """Make sure that an archive belongs to this store, and that the store may write and delete there.

    Args:
        objects: The archive. An empty one becomes this store's.
        store_id: The store's own ID.
        was_claimed: Whether the store has an archive already.

    Raises:
        ArchiveRefusedError: It belongs to another store, is not the one that this store has, or cannot be written.
        ArchiveError: It does not answer.
    """
    probe = f"{PROBE}/{secrets.token_hex(8)}"
    objects.put(probe, b"The store may write here.")
    objects.delete([probe])
    owner = read_owner(objects)
    if owner is None and was_claimed:
        raise ArchiveRefusedError(
            f"{objects.url} is empty, but this store has an archive. Give the URL that it had. If the objects have "
            "moved, copy all of them"
        )
    if owner is None:
        if next(objects.list(CAPTURES), None) is not None:
            raise ArchiveRefusedError(f"{objects.url} has captures, but no object {OWNER!r}. Use another prefix")
        if objects.create(OWNER, pack(archive_pb2.ArchiveOwner(store_id=store_id))):
            return
        owner = read_owner(objects)
    if owner != store_id:
        raise ArchiveRefusedError(
            f"{objects.url} belongs to another store. Use a prefix for each store. If that store's disk is lost, make "
            "its database again with: python -m store_svc restore"
        )
