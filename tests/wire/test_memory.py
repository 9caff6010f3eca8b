"""Memory management of services, tested in separate processes because it affects the whole process."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        [bytearray(3 << 19) for _ in range(4)]  # buffers like those of chunks; zeroing touches them
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{}
print(faults())
"""

PAGES = (3 << 19) // os.sysconf("SC_PAGE_SIZE")


def faults(setup):
    done = subprocess.run([sys.executable, "-c", FAULTS.format(setup)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(
    "setup",
    [
        "from svc_common.memory import keep_memory; assert keep_memory()",
        "from residuum.protocol.captures.reading import Reading, ReadPlan; Reading(ReadPlan(None, False))",
    ],
    ids=["a service", "a client that reads"],
)
def test_a_chunks_buffer_is_not_new_memory_each_time(setup):
    assert faults(setup) < 8 * PAGES


ARENAS = """
import ctypes, os, threading

from svc_common.memory import keep_memory

if {keeps}:
    assert keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
there = threading.Barrier({threads})

def allocate():
    libc.malloc(1000)  # a thread's first allocation takes an arena
    there.wait()

threads = [threading.Thread(target=allocate) for _ in range({threads})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


def arenas(*, keeps):
    program = ARENAS.format(keeps=keeps, threads=3 * os.cpu_count())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stderr.count("Arena ")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept_in_few_places():
    assert arenas(keeps=False) > max(os.cpu_count(), 2)
    assert arenas(keeps=True) <= max(os.cpu_count(), 2)


FROZEN = """
import gc, weakref
from svc_common.memory import freeze_heap

class Node: pass

node = Node()
node.itself = node
garbage = weakref.ref(node)
del node
kept = [[] for _ in range(50_000)]
freeze_heap()
print(garbage() is None, gc.get_freeze_count() > 50_000, len(gc.get_objects()) < 5_000)
"""


def test_freezing_excludes_loaded_objects_from_collections_and_collects_garbage():
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


IMPORTING = """
import gc
from svc_common.memory import importing

with importing():
    looked = gc.isenabled()
    kept = [[] for _ in range(50_000)]
print(looked, gc.isenabled(), gc.get_freeze_count() > 50_000)
gc.disable()
try:
    with importing():
        raise ImportError
except ImportError:
    print(gc.isenabled())
"""


def test_imports_run_without_garbage_collection_which_is_restored_afterwards():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True", "False"]
