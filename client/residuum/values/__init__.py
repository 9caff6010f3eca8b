"""Plain values that users pass in and get back. They hold no connection and no thread."""
