"""What users hand over and get back, as plain values: no connection, no thread."""
