"""The far ends of what the store is measured against: `python -m bench.store.peers flight|tcp`, started by bench.store.

Each keeps in memory what it is sent, and gives back what it has; it prints its port, and ends with its input.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from typing import Any

LENGTH = struct.Struct("<q")
"""What a TCP connection begins with: so many bytes follow; or, negative, so many are wanted."""

ACK = b"k"

_PIECE_BYTES = 1 << 20


def serve_flight() -> int:
    """Serve Arrow Flight; return the port."""
    from pyarrow import flight

    class Memory(flight.FlightServerBase):  # type: ignore[misc]
        """Holds the table that was put first; of those that come later, it takes each batch into memory and drops it.

        To keep them would cost it fresh memory in each round, which is not what it is measured for.
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
    """Serve bare bytes; return the port."""
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
    """Send all of it."""
    for at in range(0, len(data), _PIECE_BYTES):
        connection.sendall(data[at : at + _PIECE_BYTES])


def receive(connection: socket.socket, into: memoryview) -> memoryview:
    """Fill it."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at : at + _PIECE_BYTES])
        if not count:
            raise ConnectionError(f"the connection ended after {at} of {len(into)} bytes")
        at += count
    return into


def main() -> None:
    """Serve until the input ends."""
    (kind,) = sys.argv[1:]
    print({"flight": serve_flight, "tcp": serve_tcp}[kind](), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
