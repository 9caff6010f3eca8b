"""The synchronous client."""

from __future__ import annotations

from residuum._sync.client import Client
from residuum._sync.streams import Stream

__all__ = ["Client", "Stream"]

for _shown in (Client, Stream):  # as users import them
    _shown.__module__ = __name__
