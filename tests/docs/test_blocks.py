"""The documentation's code is valid, and the names in it exist. These tests do not run it.

tests/integration/test_docs.py runs the blocks that can run.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.settings import InferenceSettings
from residuum.cli.main import make_parser
from store_svc.settings import StoreSettings
from svc_common.security.tokens_file import TokenFile
from tests.docs.blocks import ELSEWHERE, NOT_ON_THE_SITE, OUTPUT, PAGES, PARSED, ROOT, RUN, Block, blocks, words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BLOCKS = [block for page in PAGES for block in blocks(page)]
OTHERS = {"cd", "chmod", "curl", "docker", "git", "grpcurl", "kubectl", "printf", "python", "ssh", "vllm"}
"""Programs of other projects. Their flags are not checked."""
SERVICES = {"inference_svc": InferenceSettings, "store_svc": StoreSettings}


def of(*languages):
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in languages], ids=str)


def flags(settings):
    return {f"--{name.replace('_', '-')}" for name in settings.model_fields} | {"--config", "--help"}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_parsed_or_has_a_reason(block: Block):
    assert block.language in {*RUN, *PARSED, OUTPUT}, "unknown language of a block"
    assert block.reason is None or block.language in RUN, "only blocks that would run need a reason"
    assert block.reason is None or len(block.reason) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mark_is_directly_above_a_block(page: Path):
    assert page.read_text().count("<!-- not run: ") == sum(block.reason is not None for block in blocks(page))


@of("python")
def test_python_compiles(block: Block):
    ast.parse(block.source, str(block))


@of("console")
def test_console_blocks_are_valid_shell(block: Block):
    assert block.commands, "commands begin with a dollar sign"
    for command in block.commands:
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True, text=True)


@of("console")
def test_commands_and_flags_exist(block: Block):
    for command in block.commands:
        for line in words(command):
            check_command(line)


@pytest.mark.parametrize("page", [*ELSEWHERE, *NOT_ON_THE_SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_this_project_exist_in_other_blocks_too(page: Path):
    for block in blocks(page):
        for command in block.commands if block.language in {"bash", "console"} else ():
            subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True, text=True)
            for line in words(command):
                if line[0] in {"make", "residuum"} or line[0].endswith("python"):
                    check_command(line)


def check_command(line):
    program, *arguments = line
    if program == "residuum":
        _, further = make_parser().parse_known_args(arguments)
        named = {word.partition("=")[0] for word in further if word.startswith("--")}
        assert named <= (flags(InferenceSettings) if arguments[0] == "serve" else set()), named
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif program.endswith("python") and arguments[:1] == ["-m"]:
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        if arguments[1] in SERVICES:
            given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            assert given <= flags(SERVICES[arguments[1]]), given
    elif program == "pip":
        for folder, asked in re.findall(r"(?<!\S)\.(/server)?\[([\w,]+)\]", " ".join(arguments)):
            project = tomllib.loads((ROOT / folder.strip("/") / "pyproject.toml").read_text())["project"]
            assert set(asked.split(",")) <= set(project["optional-dependencies"])
    else:
        assert program in OTHERS, f"unknown program {program}"


@of("toml")
def test_toml_blocks_are_settings_of_services(block: Block, tmp_path: Path):
    content = tomllib.loads(block.code)
    if "token" in content:
        (tmp_path / "tokens.toml").write_text(block.code)
        assert TokenFile(tmp_path / "tokens.toml").table()
    else:
        assert {name.replace("-", "_") for name in content} <= set(InferenceSettings.model_fields)


def test_the_command_check_detects_errors():
    for wrong in ("residuum manifest", "residuum ls --nothing", "make nothing", "python -m store_svc --nothing",
                  "python -m bench.nothing", "pip install ./server[gguf]", "nothing"):  # fmt: skip
        with pytest.raises((AssertionError, SystemExit, ModuleNotFoundError)):
            check_command(wrong.split())
    assert words("FOO=1 a 'b c' | d > e && f") == [["a", "b c"], ["d"], ["f"]]
