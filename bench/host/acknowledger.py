"""Replaces a shipper and its stores: `python -m bench.host.acknowledger SOCKET` acknowledges every item at once."""

from __future__ import annotations

import os
import socket
import sys
import threading

from inference_svc.shipping.protocol import Done, ExtentReady, LossReport, MessageReader

_RECEIVE_BYTES = 1 << 16


def main() -> None:
    """Answer each item with a message of its own, as a shipper does. End with standard input, or with the worker."""
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    print("{}", flush=True)
    reader = MessageReader()
    while data := connection.recv(_RECEIVE_BYTES):  # the ring's descriptor, which comes with it, is not taken
        for message in reader.feed(data):
            if isinstance(message, ExtentReady | LossReport):
                connection.sendall(Done(message.ticket).encode())


def _end_with_standard_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
