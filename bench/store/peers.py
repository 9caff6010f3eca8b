"""The servers that the store is compared with: `python -m bench.store.peers flight|tcp`, started by bench.store.

Each keeps the received bytes in memory and can send them back. It prints its port, and ends when standard input ends.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from typing import Any

LENGTH = struct.Struct("<q")
"""The first bytes of a TCP connection: the number of bytes that follow, or negative, the number that is requested."""

ACK = b"k"

_PIECE_BYTES = 1 << 20


def serve_flight() -> int:
    """Serve Arrow Flight; return the port."""
    from pyarrow import flight

    class Memory(flight.FlightServerBase):  # type: ignore[misc]
        """Keeps the first table. It receives the batches of later tables into memory and drops them.

        Keeping them would allocate new memory in each round, which is not part of the comparison.
        """

        table: Any = None

        def do_put(self, _context: object, _descriptor: object, reader: Any, writer: Any) -> None:
            if self.table is None:
                self.table = reader.read_all()
            else:
                for _ in reader:
                    pass
            writer.write(ACK)

        def do_get(self, _context: object, _ticket: object) -> flight.RecordBatchStream:
            return flight.RecordBatchStream(self.table)

    server = Memory("grpc://127.0.0.1:0")
    threading.Thread(target=server.serve, daemon=True).start()
    return int(server.port)


def serve_tcp() -> int:
    """Serve plain bytes over TCP; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


def _accept(listener: socket.socket) -> None:
    memory = bytearray()
    while True:
        connection, _ = listener.accept()
        with connection:
            (size,) = LENGTH.unpack(receive(connection, memoryview(bytearray(LENGTH.size))))
            if size >= 0:
                if len(memory) != size:
                    memory = bytearray(size)
                receive(connection, memoryview(memory))
                connection.sendall(ACK)
            else:
                send(connection, memoryview(memory)[:-size])


def send(connection: socket.socket, data: memoryview) -> None:
    """Send all bytes."""
    for at in range(0, len(data), _PIECE_BYTES):
        connection.sendall(data[at : at + _PIECE_BYTES])


def receive(connection: socket.socket, into: memoryview) -> memoryview:
    """Receive bytes until the view is full, and return it.

    Raises:
        ConnectionError: The connection ended early.
    """
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at : at + _PIECE_BYTES])
        if not count:
            raise ConnectionError(f"the connection ended after {at} of {len(into)} bytes")
        at += count
    return into


def main() -> None:
    """Serve until standard input ends."""
    (kind,) = sys.argv[1:]
    print({"flight": serve_flight, "tcp": serve_tcp}[kind](), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
