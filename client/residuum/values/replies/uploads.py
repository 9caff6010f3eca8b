"""What uploads of vectors and sparse autoencoders return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PutSAEResult:
    """The result of `put_sae`.

    Attributes:
        digest: The digest of the encoder in hexadecimal.
        sent: Whether the server lacked it.
        num_bytes: Bytes of the server's memory for encoders that it takes.
        free_bytes: Bytes that a new encoder can use: free ones, and those of encoders that no request needs.
    """

    digest: str
    sent: bool
    num_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class PutResult:
    """The result of `put_vectors` or `put_probes`.

    Attributes:
        digests: The digests of the given vectors in hexadecimal, in order.
        sent: Number of vectors sent: 0 if the server had them all.
        bytes_sent: Bytes of vector values sent.
    """

    digests: tuple[str, ...]
    sent: int
    bytes_sent: int
