"""Where progress bars show."""

from __future__ import annotations

import sys
import types

import pytest

from residuum.transport.progress import _ignore, progress_bar


@pytest.fixture
def jupyter(monkeypatch):
    """Makes rich believe that this is a notebook's kernel."""
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.console.Console.print", lambda *_, **__: None)
    monkeypatch.setattr("rich.live.Live.refresh", lambda _: None)


def test_a_notebook_shows_a_progress_bar(jupyter):
    with progress_bar("reading", 2) as advance:
        assert advance is not _ignore
        advance(2)
    with progress_bar("reading", 2, enabled=False) as advance:
        assert advance is _ignore


def test_a_pipe_gets_no_progress_bar():
    with progress_bar("reading", 2) as advance:
        assert advance is _ignore
