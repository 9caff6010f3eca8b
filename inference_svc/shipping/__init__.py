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

No module here imports vllm or torch.
"""
