"""Object storage. No other module uses obstore."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from residuum.rpc.extras import install_extra
from residuum.wire.rows.frames import Buffer

_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=3), "base": 2},
}
"""The retries of one operation. They bridge a short failure. `link` goes on for as long as it takes."""

_REFUSALS = (
    "NoSuchBucket",
    "ContainerNotFound",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
)
"""Codes of S3 and Azure that mean that an operation cannot succeed with these settings."""

_SHORT = ("InvalidRange", "status code: 416")
"""What errors have in them if an object ends before the bytes that were asked for."""

_SHOWN = 300
"""The characters of an error that a message shows."""


class ArchiveError(Exception):
    """An operation on the archive failed. It may succeed later."""


class ArchiveRefusedError(ArchiveError):
    """It failed for a reason that does not pass by itself: the bucket does not exist, or the credentials are wrong."""


class MissingObjectError(ArchiveError):
    """The object, or the part of it that was asked for, does not exist."""


class Objects:
    """The objects under one URL. Any thread may use them. Each method raises ArchiveError if the operation fails."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Prepare to use a URL. Credentials come from the environment, as the client of each cloud takes them.

        Args:
            url: The URL.
            create: Whether the folder of a `file://` URL is created if it does not exist.

        Raises:
            ArchiveRefusedError: The URL cannot be used, or obstore is not installed.
        """
        if importlib.util.find_spec("obstore") is None:
            raise ArchiveRefusedError(f"archives need the package obstore: {install_extra('archive')}")
        if "?" in url or "#" in url:  # obstore would leave out the rest. It may be a secret, so no message shows it
            raise ArchiveRefusedError("the URL of an archive has no query and no fragment: write ? as %3F and # as %23")
        import obstore
        from obstore import store

        from_url: Any = store.from_url

        self.url = url
        self._obstore: Any = obstore
        try:
            if url.startswith("file://"):
                # Without cleanup, the empty folders of deleted captures would stay.
                self._store: Any = from_url(url, mkdir=create, automatic_cleanup=create)
            else:
                # With a checksum, S3 refuses an upload that was damaged on its way.
                options: dict[str, Any] = {"checksum_algorithm": "sha256"} if url.startswith("s3://") else {}
                make: Any = from_url  # its types know the options of each cloud apart
                self._store = make(url, retry_config=_RETRIES, **options)
        except Exception as error:
            raise ArchiveRefusedError(f"cannot use {url}: {_text(error)}") from error

    def put(self, path: str, data: Buffer) -> None:
        """Write an object, or replace it. It exists whole or not at all."""
        with _failing(path):
            self._obstore.put(self._store, path, data, use_multipart=False)

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists. Return whether it was written."""
        try:
            with _failing(path):
                self._obstore.put(self._store, path, data, mode="create", use_multipart=False)
        except _ExistsError:
            return False
        except ArchiveError as error:
            if "NotImplemented" not in str(error):
                raise
            self.put(path, data)  # the server has no conditional writes
        return True

    def get(self, path: str) -> bytes:
        """Return an object.

        Raises:
            MissingObjectError: It does not exist.
        """
        with _failing(path, may_be_missing=True):
            return bytes(self._obstore.get(self._store, path).bytes())

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        """Return bytes of an object; fewer if it ends before.

        Raises:
            MissingObjectError: It does not exist, or has none of these bytes.
        """
        with _failing(path, may_be_missing=True):
            return memoryview(self._obstore.get_range(self._store, path, start=start, length=length))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects. Those that do not exist count as deleted."""
        try:
            with _failing("an object", may_be_missing=True):
                self._obstore.delete(self._store, list(paths))
                return
        except MissingObjectError:  # a folder, or a cloud without such a call, stops at the first one that is missing
            pass
        for path in paths:
            with suppress(MissingObjectError), _failing(path, may_be_missing=True):
                self._obstore.delete(self._store, path)

    def list(self, folder: str) -> Iterator[str]:
        """Yield the paths of the objects in a folder and its subfolders, in no particular order."""
        with _failing(folder):
            for found in self._obstore.list(self._store, folder, chunk_size=1000):
                yield from (item["path"] for item in found)


class _ExistsError(ArchiveError):
    """The object exists already."""


@contextmanager
def _failing(path: str, *, may_be_missing: bool = False) -> Iterator[None]:
    """Raise errors of obstore as an ArchiveError."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        if any(code in str(error) for code in _REFUSALS):
            raise ArchiveRefusedError(_text(error)) from None
        if not may_be_missing:
            raise ArchiveError(_text(error)) from None
        raise MissingObjectError(f"{path} does not exist") from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise _ExistsError(path) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
        raise ArchiveRefusedError(_text(error)) from None
    except (exceptions.BaseError, OSError, ValueError) as error:
        if may_be_missing and any(code in str(error) for code in _SHORT):
            raise MissingObjectError(f"{path} is too short") from None
        refused = any(code in str(error) for code in _REFUSALS)
        raise (ArchiveRefusedError if refused else ArchiveError)(_text(error)) from None


def _text(error: Exception) -> str:
    """Return the message of an error without obstore's dump of its fields."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
