"""Encoding captured rows where they are computed, a block at a time, before they go to the ring.

The layouts are written in capture.proto; `residuum.wire.encodings` has their sizes and a reference in numpy.
"""
