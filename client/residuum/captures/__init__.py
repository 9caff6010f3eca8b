"""The store's side of both clients: captures are listed, read and deleted."""
