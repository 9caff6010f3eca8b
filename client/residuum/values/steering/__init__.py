"""Steering operations, their gates, and rows of captures in place of their vectors."""
