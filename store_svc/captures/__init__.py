"""Captures: their names, their life, which rows they have, and what is published of them."""
