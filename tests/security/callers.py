"""Callers of a store, each with its own token."""

from __future__ import annotations

from residuum.rpc.channels import open_channel
from residuum.rpc.credentials import Credentials
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.rows.frames import append_prefix
from tests.store.support import describe, make_chunk, rejections, seal_request

LAYERS = [0, 1, 2]


class Caller:
    """A client of the store with one token."""

    def __init__(self, endpoint, token):
        self.channel = open_channel(endpoint, credentials=Credentials(token=token) if token else None)
        self.stub = store_pb2_grpc.StoreServiceStub(self.channel)
        self.raw_append = self.channel.stream_stream(
            "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
        )

    def open(self, name="a", tenant="", **fields):
        description = describe(name, **fields)
        description.tenant = tenant
        self.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description), timeout=20)

    def append(self, name="a", tenant="", positions=(0, 1, 2, 3, 4)):
        chunk = make_chunk(LAYERS, positions)
        return rejections(self.raw_append(iter([append_prefix(1, name, len(chunk), tenant) + chunk]), timeout=20))

    def seal(self, name="a", tenant=""):
        return self.stub.SealCapture(seal_request(name, tenant=tenant), timeout=20).manifest

    def open_many(self, *names):
        """Open captures, given as (ID, tenant), with one call. Return the reason of each error, or 0."""
        opens = []
        for name, tenant in names:
            opens.append(store_pb2.OpenCaptureRequest(description=describe(name)))
            opens[-1].description.tenant = tenant
        responses = self.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=opens), timeout=20)
        reasons = {result.index: result.error.reason for response in responses for result in response.results}
        return [reasons[index] for index in range(len(opens))]

    def seal_many(self, *names):
        """Seal captures, given as (ID, tenant), with one call. Return the reason of the error of each."""
        seals = [seal_request(name, tenant=tenant) for name, tenant in names]
        response = self.stub.SealCaptures(store_pb2.SealCapturesRequest(seals=seals), timeout=20)
        return [result.error.reason for result in response.results]

    def write(self, name="a", tenant="", **fields):
        """Write and seal a capture, so that it ends."""
        self.open(name, tenant, **fields)
        assert self.append(name, tenant) == {}
        assert self.seal(name, tenant).state == capture_pb2.CAPTURE_STATE_COMPLETE

    def get(self, name="a", **tenant):
        return self.stub.GetCapture(store_pb2.GetCaptureRequest(capture_id=name, **tenant), timeout=20).manifest

    def read(self, name="a", **tenant):
        request = store_pb2.ReadChunksRequest(capture_id=name, follow=True, **tenant)
        return list(self.stub.ReadChunks(request, timeout=20))

    def list(self, size=100, **tenant):
        """Return all listed captures as (tenant, ID), page by page."""
        request = store_pb2.ListCapturesRequest(page_size=size, **tenant)
        found = []
        while True:
            page = self.stub.ListCaptures(request, timeout=20)
            found += [(item.tenant, item.capture_id) for item in page.captures]
            request.page_token = page.next_page_token
            if not request.page_token:
                return found

    def delete(self, name="a", **tenant):
        request = store_pb2.DeleteCaptureRequest(capture_id=name, **tenant)
        return self.stub.DeleteCapture(request, timeout=20).freed_bytes

    def delete_many(self, *names, **tenant):
        """Delete captures. Return the freed bytes and the error of each."""
        request = store_pb2.DeleteCapturesRequest(capture_ids=names, **tenant)
        results = self.stub.DeleteCaptures(request, timeout=20).results
        return [(result.freed_bytes, result.error) for result in results]

    def label(self, name="a", **tenant):
        request = store_pb2.LabelCaptureRequest(
            capture_id=name, labels=[capture_pb2.Label(name="split", text="train")], **tenant
        )
        return self.stub.LabelCapture(request, timeout=20).labels

    def stats(self):
        return self.stub.GetStats(store_pb2.GetStatsRequest(), timeout=20)
