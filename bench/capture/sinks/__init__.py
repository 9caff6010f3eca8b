"""The destinations of captured rows: stores, or the ring. And the client that fetches rows from stores."""
