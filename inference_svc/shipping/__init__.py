"""From the worker's ring to the store: what the model's process hands over, and the processes that send it.

A worker (a process of vLLM) fills extents of a ring in shared memory; shippers (processes that the inference service
starts) send them to the store of their capture by AppendChunks, and give each one back when the store has acknowledged
all of it.

* `ring`: the shared memory. `protocol`: the words between a worker and its shippers. `framing`: rows in chunks.
* `worker`: the worker's end. `producer` fills the extents that `allotment` gives it; `dispatcher` is its thread for the
  sockets.
* `shipper`: their process. `parcels`, `outbox`, `uploader`: from an extent to acknowledged frames. `lanes`: these for
  each of several stores. `control`, `process`: what holds them together.
* `supervisor`: starts shippers and keeps them running.

Nothing here imports vllm or torch.
"""
