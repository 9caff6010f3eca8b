"""Shared memory with readers and writers on the same machine, over a Unix socket; see `DescribeStore` in store.proto.

A peer is not trusted. It can change its memory at any time, so the store checks what it has copied, never what still
lies there. It cannot shrink its memory (that would end the store with SIGBUS), because the memory is sealed.
"""
