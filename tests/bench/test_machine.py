import os
import socket

import pytest

from bench import machine as described
from bench.machine import REVISION_VARIABLE, Gpu, Machine, Revision, gpus, is_committed, used_mib, versions
from bench.memory import peak_mib, peak_of


def test_a_machine_is_described_only_by_its_kind():
    machine = Machine.describe()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert socket.gethostname() not in machine.cpu


def test_versions_of_what_is_installed():
    found = versions()
    assert found["residuum"]
    assert found["torch"]
    assert all(found.values())


def test_a_copy_without_history_gets_its_revision_from_the_environment(monkeypatch):
    monkeypatch.setenv(REVISION_VARIABLE, "1234abc")
    assert Revision.describe() == Revision("1234abc", ())


def test_the_version_of_cuda_is_torchs():
    torch = pytest.importorskip("torch")
    assert versions().get("cuda") == torch.version.cuda


SMI = "NVIDIA H200, 580.1, 143771, 512\nNVIDIA H200, 580.1, 143771, [N/A]\n"


def test_gpus_are_read_from_nvidia_smi(monkeypatch):
    monkeypatch.setattr(described, "_run", lambda command: SMI)
    assert gpus() == [Gpu("NVIDIA H200", "580.1", 143771, 512), Gpu("NVIDIA H200", "580.1", 143771, 0)]
    assert used_mib() == 512
    monkeypatch.setattr(described, "_cuda", lambda: "13.0")
    machine = Machine.describe()
    assert machine.kind == "h200-x2"
    assert (machine.gpu, machine.gpu_count, machine.gpu_driver) == ("NVIDIA H200", 2, "580.1")
    assert machine.gpu_memory_gib == 140.4


def test_gpus_are_ignored_without_a_cuda_build_of_torch(monkeypatch):
    monkeypatch.setattr(described, "_run", lambda command: SMI)
    monkeypatch.setattr(described, "_cuda", lambda: None)
    machine = Machine.describe()
    assert (machine.kind, machine.gpu) == ("cpu", "")


@pytest.mark.parametrize(
    ("tracked", "changed", "committed"),
    [("x.json\n", "", True), ("x.json\n", " M x.json\n", False), ("", "?? x.json\n", False)],
)
def test_an_unchanged_committed_file_is_recognized(monkeypatch, tracked, changed, committed):
    monkeypatch.setattr(described, "_git", lambda *words: tracked if words[0] == "ls-files" else changed)
    assert is_committed(described.ROOT / "x.json") is committed


def test_without_git_no_file_counts_as_committed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert not is_committed(described.ROOT / "README.md")


def test_without_nvidia_smi_gpus_are_read_from_torch(monkeypatch):
    monkeypatch.setattr(
        described, "_run", lambda command: None if command[0] == "nvidia-smi" else '[["A", 2097152, 1048576]]'
    )
    assert gpus() == [Gpu("A", "", 2, 1)]


def test_without_nvidia_smi_and_torch_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr(described, "_run", lambda command: None)
    assert gpus() == []


def test_a_missing_program_has_no_output():
    assert described._run(["/nonexistent/program"]) is None
    assert described._run(["false"]) is None


def test_peak_memory():
    assert peak_of(os.getpid()) > 1
    assert peak_mib()["front end"] > 1
    assert peak_of(2**22 + 1) == 0  # above the greatest process id
