"""The read of one open capture: the rows that it has, and with `follow` those that come until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frame_keys import unpack_frame
from store_svc.captures.capture_names import unknown_capture
from store_svc.captures.catalog import Catalog, Feed
from store_svc.captures.lifecycle import Capture
from store_svc.reading.query import Query, Selection


class OpenRead:
    """The state of a read. Its results are serialised ReadChunksResponses."""

    def __init__(
        self,
        feed: Feed,
        request: Selection,
        catalog: Catalog,
        rows: Callable[[Iterable[bytes], Query], Iterator[bytes]],
        manifest: Callable[[Capture], capture_pb2.CaptureManifest],
    ) -> None:
        """Begin a read.

        Args:
            feed: The capture.
            request: The rows to read.
            catalog: Says whether the store is stopping.
            rows: Yields the responses with the wanted rows of frames, given by their keys.
            manifest: Returns the manifest of a capture.

        Raises:
            Failure: The selection is invalid.
        """
        self._feed = feed
        self._request = request
        self._catalog = catalog
        self._rows = rows
        self._manifest = manifest
        self._sent = 0
        self.is_done = False
        """Whether everything was yielded."""
        Query(request, feed.capture.description, feed.capture.sequences)  # raises

    def begin(self) -> bytes:
        """Return the first response: the manifest."""
        return self._manifest_of(self._feed.capture)

    def wait(self, is_cancelled: Callable[[], bool]) -> None:
        """With `follow`, wait until `news` has something to yield or to raise."""
        feed = self._feed
        if not self._request.follow:
            return
        with feed.condition:
            feed.condition.wait_for(
                lambda: (
                    len(feed.keys) > self._sent
                    or feed.capture.ended
                    or feed.deleted
                    or self._catalog.stopping
                    or is_cancelled()
                )
            )

    def news(self, is_cancelled: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the rows that were published since the last call, and at the end the last manifest.

        An empty response says that the next one may take long to come.

        Raises:
            Failure: The capture was deleted, the store is stopping, or the caller has cancelled.
        """
        with self._feed.condition:
            self._check_usable(is_cancelled)
            capture, end = self._feed.capture, len(self._feed.keys)
        query = Query(self._request, capture.description, capture.sequences)
        published = self._feed.keys[self._sent : end]
        yield from self._rows((key for key in published if query.wants(unpack_frame(key))), query)
        self._sent = end
        yield b""
        if capture.ended or not self._request.follow:
            self._check_usable(is_cancelled)
            yield self._manifest_of(capture)
            self.is_done = True

    def _manifest_of(self, capture: Capture) -> bytes:
        return store_pb2.ReadChunksResponse(manifest=self._manifest(capture)).SerializeToString()

    def _check_usable(self, is_cancelled: Callable[[], bool]) -> None:
        if self._feed.deleted:
            raise unknown_capture(self._feed.capture.description.capture_id)
        if self._catalog.stopping and not self._feed.capture.ended:
            raise Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")
        check_not_cancelled(is_cancelled)


def check_not_cancelled(is_cancelled: Callable[[], bool]) -> None:
    """Check that the caller still wants the answer.

    Raises:
        Failure: ABORTED.
    """
    if is_cancelled():
        raise Failure(Reason.ERROR_REASON_ABORTED, "The caller cancelled the call.")
