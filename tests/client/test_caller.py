"""Which line a warning of the client names."""

import threading
import warnings

import pytest

from residuum.protocol import caller


def warned_in_a_thread():
    """Return the file that a warning names which another thread causes."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = threading.Thread(target=caller.warn, args=["gone", UserWarning])
        thread.start()
        thread.join()
    return told[0].filename


def test_without_a_caller_the_warning_names_no_file():
    assert warned_in_a_thread() == "sys"


def test_a_filter_for_a_module_of_the_user_holds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="gone", module=__name__.replace(".", r"\."))
        with pytest.raises(UserWarning, match="gone"):
            caller.warn("gone")


def test_the_same_line_is_told_once_by_default():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            caller.warn("again")
    assert [(item.filename, str(item.message)) for item in told] == [(__file__, "again")]
