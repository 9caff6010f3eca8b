"""Requests: what they ask for, checked in full, and which of them there are."""
