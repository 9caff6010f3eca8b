"""The list of RESIDUUM_ variables in `svc_common.environment` matches the whole tree."""

import re
import subprocess
from pathlib import Path

import pytest

from inference_svc.settings import InferenceSettings
from store_svc.settings import StoreSettings
from svc_common.environment import OTHERS, PREFIX, SETTINGS

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(rf"{PREFIX}([A-Z0-9]+(?:_[A-Z0-9]+)*)")
SLIPS = {"CAPTURE_SITE", "MODL", "PORT", "PORTS", "RETAIN_HOUR", "RING_MB", "STORES", "TOKENS_FILE", "XYZZY"}
"""Names that tests and documents use on purpose although they are no variables."""


@pytest.fixture(scope="module")
def found():
    """Return every variable in the tree, with the files that name it."""
    command = ["git", "grep", "-I", "--only-matching", "--null", "-E", f"{PREFIX}[A-Z0-9_]+"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = {}
    for line in done.stdout.splitlines():
        file, _, text = line.partition("\0")
        for name in NAME.findall(text):
            names.setdefault(name, set()).add(file)
    return names


def test_settings_are_those_of_both_services():
    fields = InferenceSettings.model_fields.keys() | StoreSettings.model_fields.keys()
    assert {name.upper() for name in fields} == SETTINGS, "svc_common/environment.py lists them"


def test_every_variable_in_the_tree_is_listed(found):
    unknown = {name: files for name, files in found.items() if name not in SETTINGS | OTHERS | SLIPS}
    assert not unknown, "list them in svc_common/environment.py, or services refuse them or log them"


def test_every_listed_variable_is_read(found):
    assert sorted(OTHERS - found.keys()) == []
    assert not OTHERS & SETTINGS
    assert sorted(SLIPS - (found.keys() - SETTINGS - OTHERS)) == []
