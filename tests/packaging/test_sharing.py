"""tests/sharing.py lists folders and files by name, so a renamed one would be distributed wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sharing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", sharing._ONE_ENGINE)
def test_folders_that_share_an_engine_exist(folder: str) -> None:
    assert list((ROOT / folder).glob("test_*.py"))


@pytest.mark.parametrize("file", sharing._OWN_ENGINES)
def test_files_that_share_no_engine_exist_in_such_folders(file: str) -> None:
    assert (ROOT / file).is_file()
    assert Path(file).parent.as_posix() in sharing._ONE_ENGINE
    assert sharing.group_of(f"{file}::test_x") == file
