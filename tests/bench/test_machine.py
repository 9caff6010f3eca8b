import os
import socket

from bench.capture.memory import peak_mib, peak_of
from bench.machine import Machine, Revision, versions


def test_a_machine_is_described_by_its_kind_alone():
    machine = Machine.describe()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert socket.gethostname() not in machine.cpu


def test_versions_of_what_is_installed():
    found = versions()
    assert found["residuum"]
    assert found["torch"]
    assert all(found.values())


def test_a_revision_lists_what_differs_from_it():
    revision = Revision.describe()
    assert all(not path.startswith("/") for path in revision.changed)


def test_peak_memory():
    assert peak_of(os.getpid()) > 1
    assert peak_mib()["front end"] > 1
    assert peak_of(2**22 + 1) == 0  # above the greatest process id
