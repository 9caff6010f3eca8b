import json
import os
import signal
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from bench.processes import RunFailedError, run_child


def module(folder, text):
    """Write a module that a child can run; return the child's environment."""
    (folder / "told.py").write_text(f"import sys, os, time\nfrom pathlib import Path\n{text}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}


def gone(pid):
    """Return whether a process has ended. Zombies count as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_childs_result_returns_immediately_and_no_process_stays(tmp_path):
    environment = module(
        tmp_path,
        """
def main():
    import subprocess
    from multiprocessing import shared_memory
    from bench.processes import hand_over
    left = shared_memory.SharedMemory(create=True, size=1)
    # It ignores SIGTERM, as vLLM's processes do for some seconds.
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stays])
    try:
        hand_over(Path(sys.argv[2]), {"pid": child.pid, "memory": left.name, "told": Path(sys.argv[1]).read_text()})
    finally:
        time.sleep(600)  # a slow end, which must not delay the result
""",
    )
    started = time.monotonic()
    result = run_child("told", {"x": 1}, tmp_path, environment, "a run")
    assert time.monotonic() - started < 60
    assert json.loads(result["told"]) == {"x": 1}
    assert gone(result["pid"])
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(result["memory"])


def test_a_failed_child_reports_its_log(tmp_path):
    environment = module(tmp_path, "def main():\n    raise ValueError('no such layer')")
    with pytest.raises(RunFailedError, match=r"(?s)a run: ended with code 1.*no such layer"):
        run_child("told", {}, tmp_path, environment, "a run")


def test_a_failed_child_reports_the_first_error_of_a_long_log(tmp_path):
    environment = module(
        tmp_path, "def main():\n    print('ValueError: the cause', *range(500), sep='\\n', flush=True)\n    sys.exit(1)"
    )
    with pytest.raises(RunFailedError, match=r"(?s)ValueError: the cause\n\.\.\.\n.*499"):
        run_child("told", {}, tmp_path, environment, "a run")


def test_a_child_over_its_timeout_is_killed(tmp_path):
    environment = module(
        tmp_path, "def main():\n    Path(sys.argv[2] + '.pid').write_text(str(os.getpid()))\n    time.sleep(600)"
    )
    with pytest.raises(RunFailedError, match="took too long"):
        run_child("told", {}, tmp_path, environment, "a run", seconds=5)
    assert gone(int((tmp_path / "result.json.pid").read_text()))


def test_a_child_that_ends_without_a_result_has_failed(tmp_path):
    environment = module(tmp_path, f"def main():\n    os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(RunFailedError, match="ended with code -9"):
        run_child("told", {}, tmp_path, environment, "a run")
    environment = module(tmp_path, "def main():\n    pass")
    with pytest.raises(RunFailedError, match="ended with code 0"):
        run_child("told", {}, tmp_path, environment, "a run")
