"""Encodings of captured rows. The device encodes a block at a time, before the rows go to the ring.

capture.proto defines the formats. `residuum.wire.encodings` has their sizes and a reference implementation in numpy.
"""
