"""Searches for tokens whose rows project most onto a direction: nothing but the hits leaves the store.

A search selects captures, and threads that all searches share scan them (`scanning`, `turns`). A row is first scored in
float32. If it may be a hit, it is scored in float64 (`scores`) and kept with the best (`hits`). At the end, hits get
their tokens and texts (`texts`).
"""
