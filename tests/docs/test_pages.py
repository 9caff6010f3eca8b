"""The pages are consistent: each is in the navigation, links have targets, and the reference is complete."""

from __future__ import annotations

import argparse
import inspect
import posixpath
import re
import sys
from pathlib import Path

import pytest

import residuum
import residuum.directions
from inference_svc.settings import InferenceSettings
from residuum.cli.main import make_parser
from residuum.v1 import capture_pb2
from residuum.values.captures.spans import CHAT_ROLES
from store_svc.settings import StoreSettings
from tests.docs.blocks import DOCS, ELSEWHERE, NOT_ON_THE_SITE, PAGES, ROOT

sys.path.insert(0, str(DOCS / "_extensions"))

import docstrings  # an extension of the site
import generated
import repository

CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def prose(page):
    return CODE.sub("", page.read_text())


def anchors(page):
    """Return the anchors of a page's headings, as code hosts and MyST generate them."""
    titles = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", [*PAGES, *ELSEWHERE, *NOT_ON_THE_SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path):
    assert not re.search(r"\]\([^)\s]*\n", prose(page)), "a link with a line break in its target is not a link"
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), target


def test_every_page_is_in_the_navigation_once():
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    there = [page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES if page.is_relative_to(DOCS)]
    assert sorted(named) == sorted(name for name in there if name != "index")


def test_included_documents_exist():
    found = re.search(r"^repository_documents = (\{.*?^\})", (DOCS / "conf.py").read_text(), re.DOTALL | re.MULTILINE)
    assert sorted(ROOT / name for name in eval(found[1]).values()) == sorted(ELSEWHERE)
    for page, name in eval(found[1]).items():
        assert (ROOT / name).is_file()
        stub = (DOCS / page).with_suffix(".md")
        assert posixpath.relpath(ROOT / name, stub.parent) in stub.read_text(), "the repository's page links to it"


def test_links_out_of_the_site_become_pages_files_or_plain_text():
    pages = {ROOT / "ARCHITECTURE.md": "project/architecture", DOCS / "faq.md": "faq"}
    text = "[a](../ARCHITECTURE.md#rows) [b](faq.md) [c](../protos) [d](nothing.md) [e](https://x.y) `[f](g)`\n"
    here = repository.Links("limits", pages, "").rewritten(text, DOCS / "limits.md")
    assert here == "[a](project/architecture.md#rows) [b](faq.md) c [d](nothing.md) [e](https://x.y) `[f](g)`\n"
    there = repository.Links("howto/x", pages, "https://h/main/").rewritten("[c](../../protos)", DOCS / "howto/x.md")
    assert there == "[c](https://h/main/protos)"
    code = "```text\n[a](../ARCHITECTURE.md)\n```\n"
    assert repository.Links("limits", pages, "").rewritten(code, DOCS / "limits.md") == code


@pytest.mark.parametrize(("page", "tables", "plots"), [("README.md", 1, 1), ("docs/costs.md", 8, 0)])
def test_pages_have_the_measured_figures(page: str, tables: int, plots: int):
    """tests/bench/test_readme.py checks that they are those of the results."""
    (figures,) = re.findall(r"^<!-- figures: .*?-->$\n(.*?)^<!-- ", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert figures.count("| ---") >= tables
    assert len(re.findall(r"^!\[.+\]\(\S+\.png\)$", figures, re.MULTILINE)) == plots


# ------------------------------------------------------------------------------------------------------- the reference


def directives():
    text = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    return re.findall(r"^\.\. auto(?:class|exception|function):: (\S+)$", text, re.MULTILINE)


def test_every_public_name_is_in_the_reference_once():
    named = directives()
    assert len(named) == len(set(named))
    public = {f"residuum.{name}" for name in residuum.__all__} - {
        "residuum.__version__",
        "residuum.directions",
        "residuum.sae",
    }
    public |= {f"residuum.directions.{name}" for name in residuum.directions.__all__}
    public |= {f"residuum.sae.{name}" for name in residuum.sae.__all__}
    public -= {"residuum.directions.Directions"}  # documented as residuum.Directions
    of_torch = {f"residuum.torch.{name}" for name in ("ActivationDataset", "ActivationBatch")}
    of_training = {
        f"residuum.training.{name}"
        for name in ("ActivationBatches", "Batch", "DictionaryLearningBuffer", "SAELensData", "SparsifyData")
    }
    of_ray = {f"residuum.ray.{name}" for name in ("RayServices", "extract", "read_captures", "read_extracted", "serve")}
    assert set(named) - of_torch == public | of_training | of_ray


@pytest.mark.parametrize(
    "text",
    [
        (DOCS / "concepts/sites.md").read_text().replace("`", ""),
        residuum.MessageSpan.__doc__ or "",
        residuum.Activations.select.__doc__ or "",
    ],
    ids=["page", "MessageSpan", "select"],
)
def test_the_roles_of_messages_are_all_named(text: str):
    assert [role for role in CHAT_ROLES if f'"{role}"' not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_clients_have_an_endpoint(page: Path):
    assert "Client()" not in page.read_text(), "there is no default"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "quickstart.md"], ids=lambda page: page.stem)
def test_first_pages_activate_the_environment_before_they_use_it(page: Path):
    """`make` installs into .venv, and a new shell finds nothing there."""
    text = page.read_text()
    assert text.index("`source .venv/bin/activate`") < text.index("import residuum")
    assert text.index("`source .venv/bin/activate`") < text.index("\n$ residuum ")


@pytest.mark.parametrize("page", ["concepts/sites.md", "concepts/steering.md"])
def test_pages_say_how_to_start_a_server_with_the_sites_of_their_examples(page: str):
    """The servers of the tests have these sites, and a server by default has not."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    used = set(re.findall(r'"(attn_out|k|mlp_act|mlp_out|q|resid_pre|z)"', "".join(blocks)))
    (told,) = re.findall(r'`make serve ARGS="--capture-sites ([\w,]+)"`', prose(DOCS / page))
    assert used
    assert used <= set(told.split(","))


@pytest.mark.parametrize("name", sorted(set(residuum.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring(name: str):
    thing = getattr(residuum, name)
    assert inspect.getdoc(thing)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    silent = [
        key for key, value in members if not key.startswith("_") and inspect.isfunction(value) and not value.__doc__
    ]
    assert not silent


def test_the_reference_has_every_command_and_flag():
    made = "\n".join(generated.commands())

    def walk(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from walk(command)
            elif action.dest not in {"help", "version"}:
                yield from action.option_strings

    assert {flag for flag in walk(make_parser()) if f"`{flag}" not in made} == set()


@pytest.mark.parametrize(("service", "settings"), [("inference", InferenceSettings), ("store", StoreSettings)])
def test_the_reference_has_every_setting_with_a_description(service: str, settings: type):
    rows = [line for line in generated.settings(service) if line.startswith("| `--")]
    assert len(rows) == len(settings.model_fields)
    assert all(len(row.split(" | ")[2]) > 10 for row in rows)


def test_every_flag_that_pages_name_exists():
    others = {"--help", "--version", "--shm-size", "--profile"}  # ours for programs, Docker's
    others |= {"--worker-cls", "--api-key", "--api-server-count", "--gpu-memory-utilization"}  # vLLM's
    others |= {"--kv-cache-memory-bytes", "--kv-sharing-fast-prefill", "--middleware", "--shutdown-timeout"}
    known = set(re.findall(r"`(--[a-z-]+)", "\n".join([*generated.commands(), *generated.settings("inference"),
                *generated.settings("store")]))) | others | {"--config"}  # fmt: skip
    for page in PAGES:
        code = [span for span in re.findall(r"`([^`]+)`", prose(page)) if "python -m bench" not in span]
        named = {flag for span in code for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", span)}
        assert named <= known, f"{page}: {named - known}"


def test_every_reason_of_incomplete_captures_is_explained():
    page = (DOCS / "concepts/captures.md").read_text()
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    names = {name.removeprefix("INCOMPLETE_REASON_") for name in capture_pb2.IncompleteReason.keys()}  # noqa: SIM118
    assert named == names - {"UNSPECIFIED"}


def test_bars_match_the_results():
    every, missed = list(generated.bars("all")), list(generated.bars("missed"))
    assert len(every) > 10
    assert [row for row in every if "**missed**" in row] == missed[2:]


def test_formulas_in_docstrings_become_literal_blocks():
    lines = ["For a row x:", "", "    Add   x + v", "", "    Cap   x", "", "Example:", "    >>> x"]
    docstrings.make_literal_blocks(lines)
    assert lines == ["For a row x:", "", "::", "", "    Add   x + v", "", "    Cap   x", "", "Example:", "    >>> x"]


def test_operations_have_the_signature_of_their_fields():
    kind = residuum.Add
    signature, _ = docstrings.sign(None, "class", "residuum.Add", kind, None, "(*values, **_named)", None)
    assert signature.startswith("(vector, *, layer=None")
    assert docstrings.sign(None, "class", "residuum.Vector", residuum.Vector, None, "(array)", None)[0] == "(array)"


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^\| \*\*([^*]+)\*\*", (DOCS / "concepts/glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 1
    assert terms == sorted(terms, key=str.lower)
