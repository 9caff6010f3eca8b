"""Writing captures: incoming streams, write transactions, quotas and retention."""
