"""Marks decide which tests share a process. A test that uses a shared engine without the mark is an error."""

import pytest

from tests import sharing


class Item:
    """The attributes of a test that `sharing` reads."""

    def __init__(self, path, *marks):
        self.path, self.nodeid, self.fixturenames = path, "tests/x.py::test_x", ["engine"]
        self._marks = dict(marks)

    def get_closest_marker(self, name):
        return self._marks.get(name)


def test_a_group_is_the_engine_of_the_mark_or_the_file():
    shared = [sharing.group_of(f"tests/integration/{name}.py::test_x[1]") for name in ("test_docs", "test_smollm2")]
    assert shared == ["integration", "integration"]
    assert sharing.group_of("tests/conformance/test_rows.py::test_x") == "conformance"
    for file in ("tests/conformance/test_parallel.py", "tests/packaging/test_locks.py"):
        assert sharing.group_of(f"{file}::test_x") == file


def test_a_test_of_a_shared_engine_needs_the_mark(tmp_path):
    file = tmp_path / "test_x.py"
    marked = (sharing.MARK, pytest.mark.shares_engine("one").mark)
    sharing.check([Item(file, marked)], "engine", "one", tmp_path)
    sharing.check([Item(tmp_path.parent / "test_y.py")], "engine", "one", tmp_path)
    for item in (Item(file), Item(file, (sharing.MARK, pytest.mark.shares_engine("two").mark))):
        with pytest.raises(pytest.UsageError, match="shares_engine"):
            sharing.check([item], "engine", "one", tmp_path)
