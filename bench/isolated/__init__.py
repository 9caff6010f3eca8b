"""Measures one configuration in a fresh process, until a client holds the captured rows."""
