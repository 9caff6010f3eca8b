"""Shipping: encoded rows go from the worker's ring to the stores.

A worker (a process of vLLM) fills extents of a ring in shared memory. Shippers (processes that the inference service
starts) send each extent to its capture's store by AppendChunks. A shipper gives an extent back when the store has
acknowledged all of it.

* `ring`: the shared memory. `protocol`: the messages between a worker and its shippers. `framing`: cuts rows into
  chunks.
* `worker`: the worker's side. `producer` fills the extents that `allotment` allocates; `dispatcher` is the thread that
  serves the sockets.
* `shipper`: the shipper process. `parcels`, `outbox` and `uploader` turn extents into acknowledged messages. `lanes`
  has one outbox and one uploader for each store. `control` serves the worker's socket, and `process` runs everything.
* `supervisor`: starts shippers and restarts them.

Why no row is lost or stored twice:

* A shipper copies nothing aside. If a stream breaks, it sends again from the ring. If a shipper dies, its extents go to
  another one. So each row is delivered at least once, and the store keeps the first write only.
* The ring is a sealed memfd, passed over a Unix socket. It has no name, and disappears with its last process.
* Each hand-over of an extent has a ticket, so a late acknowledgement cannot free bytes that were filled again.
* A worker ends with its service, however the service ended (`taps/vllm/watchdog.py`). It waits for pid file
  descriptors, so it notices also while its step waits for the store.
* A service that is told to stop lets running requests end, and aborts them after the grace period. Then it waits for
  rows, seals and shippers, each for a limited time.

Why it is fast:

* A chunk has up to 1.9 MiB: the cost of a message does not depend on its size, so large chunks cost less per row. Both
  ends reuse freed buffers (`svc_common/memory.py`). Otherwise touching new memory costs more than everything else.
  gRPC's own options (frame size, write buffer, window, read sizes) make no measurable difference.
* A shipper cuts an extent into chunks while it sends. Only what is in transit (`--max-unacked-bytes`) has headers and,
  one chunk at a time, copied bytes.

No module here imports vllm or torch.
"""
