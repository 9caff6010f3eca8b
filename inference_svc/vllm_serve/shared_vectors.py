"""The vectors that several API servers of one `vllm serve` share.

vLLM's API servers accept connections on the same port, so a caller cannot choose the process that gets a request. A
request may name a vector by its digest that another request has brought to another process. Each process writes new
vectors into a folder beside the control sockets, which only vLLM's user can read, and looks for missing ones there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from inference_svc.admission.specs import ResolvedSpec
    from inference_svc.resources.vector_cache import VectorCache
    from inference_svc.vllm_serve.requests.xargs import ResiduumArguments

_CHECK_EVERY = 64
"""After how many new vectors the folder's size is checked: looking at thousands of files takes milliseconds."""

_PART = ".part"


class RequestVectors:
    """Keeps the vectors that come with requests, and gets those that another API server has."""

    def __init__(self, cache: VectorCache, shared: SharedVectors | None) -> None:
        """Keep vectors in a cache. `shared` are those of all API servers; None if this is the only one."""
        self._cache = cache
        self._shared = shared

    def keep(self, arguments: ResiduumArguments, spec: ResolvedSpec) -> None:
        """Keep the vectors that came with a request, and those that it names and another API server has."""
        for vector in arguments.vectors:
            self._cache.put(vector)
        if self._shared is not None:
            with suppress(OSError):  # the disk is full: then other API servers ask callers for these vectors
                for vector in arguments.vectors:
                    self._shared.put(vector)
            for vector in self._shared.find(self._cache.missing(spec.shared.digests)):
                self._cache.put(vector)


class SharedVectors:
    """The vectors in a folder, each in a file named by its digest. Several processes may use the same folder."""

    def __init__(self, folder: Path, max_vectors: int, max_bytes: int) -> None:
        """Share the vectors in a folder.

        Args:
            folder: The folder; created for the first vector if it does not exist.
            max_vectors: Most vectors that are kept. Until the next check, each process may add 64 more.
            max_bytes: Most bytes of vectors that are kept; until the next check, the same.
        """
        self._folder = folder
        self._max_vectors = max_vectors
        self._max_bytes = max_bytes
        self._added = 0

    def put(self, vector: tensor_pb2.Vector) -> None:
        """Share a checked vector.

        Raises:
            OSError: The file cannot be written.
        """
        path = self._path(vector.digest)
        if self._touch(path):
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f"{path.name}-{os.getpid()}{_PART}")
        try:
            part.write_bytes(vector.values)
            part.rename(path)  # another process sees the whole file or none
        except OSError:
            part.unlink(missing_ok=True)  # the disk may be full
            raise
        self._added += 1
        if self._added % _CHECK_EVERY == 0:
            self._evict()

    def find(self, digests: Iterable[bytes]) -> list[tensor_pb2.Vector]:
        """Return those of the vectors that some process has shared."""
        found = []
        for digest in digests:
            try:
                values = self._path(digest).read_bytes()
            except FileNotFoundError:
                continue
            dtype = tensor_pb2.DATA_TYPE_FLOAT32
            if digest_of_bytes(dtype, values) == digest:  # otherwise the disk was full, for example
                self._touch(self._path(digest))
                found.append(tensor_pb2.Vector(digest=digest, dtype=dtype, values=values))
        return found

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    @staticmethod
    def _touch(path: Path) -> bool:
        """Note that a vector is used now, and return whether it is there."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _evict(self) -> None:
        """Drop the least recently used vectors until the limits hold."""
        files = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process may drop vectors at the same time
                if path.suffix != _PART:
                    files.append((path.stat(), path))
        files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        kept = 0
        for number, (status, path) in enumerate(files):
            kept += status.st_size
            if number >= self._max_vectors or kept > self._max_bytes:
                path.unlink(missing_ok=True)
