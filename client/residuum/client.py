"""The synchronous client."""

from __future__ import annotations

from residuum._sync.client import Client
from residuum._sync.streams import Stream

__all__ = ["Client", "Stream"]

for _shown in (Client, Stream):  # show the module that users import
    _shown.__module__ = __name__
