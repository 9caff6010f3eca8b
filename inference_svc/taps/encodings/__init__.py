"""Encodings of captured rows. The device encodes a block at a time, before the rows go to the ring.

capture.proto defines the formats. `residuum.wire.rows.encodings` has their sizes and a reference in numpy.

* On a GPU (`taps/gpu/encoder.py`) encoding runs on the sink's own stream, next to the model's. The engine's thread does
  not wait for it, and no memory is allocated for a block.
* On a CPU (`taps/cpu/encoder.py`) encoding runs in the step, in torch.
* Making the signs of a random projection takes as long as many steps, and callers choose the seeds. So no step makes
  signs. Before a request goes to the engine, `resources/projections.py` has a thread of each worker make them; a step
  only looks them up. If a worker cannot make them, it says so in its answer and raises nothing: vLLM does not read the
  answers of other ranks when one rank raises. Only the requests that need these signs fail.
* The vectors of PROJECT are copied from the bank when their request begins, because its last blocks leave after it has
  ended, when the bank's rows may belong to others.
* The store and the shippers know of an encoding only its sizes (`RowFormat`). They cut rows without decoding them. The
  store rejects a chunk that is not encoded like its capture.
* The client keeps rows encoded and decodes a layer when you look at it (`values/captures/blocks.py`).
"""
