"""Finds, lists, reads, searches and deletes captures in one store or several. No I/O."""
