"""The contract does not break clients of its last release, and its page matches protos/."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos/residuum/v1").glob("*.proto"))
PAGE = (ROOT / "docs/protos.md").read_text()
SERVICES = ("store_svc", "inference_svc", "svc_common")


@pytest.fixture
def copy(tmp_path):
    for folder in ("protos", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copyfile(ROOT / "docs/protos.md", tmp_path / "docs/protos.md")
    return tmp_path


class TestBreaking:
    @pytest.fixture
    def breaking(self, copy, tool):
        """Changes a proto, and returns the output of the check."""

        def check(name="capture", before="", after=""):
            path = copy / f"protos/residuum/v1/{name}.proto"
            text = path.read_text()
            assert before in text
            path.write_text(text.replace(before, after, 1))
            command = [tool("buf"), "breaking", "protos", "--against", "protos/contract.binpb"]
            return subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)

        return check

    def test_the_current_contract_is_compatible(self, breaking):
        result = breaking()
        assert result.returncode == 0, result.stdout

    @pytest.mark.parametrize(
        ("name", "before", "after", "said"),
        [
            ("capture", "bytes payload = 15;", "bytes payload = 14;", "payload"),
            ("capture", "fixed32 crc32c = 2;", "uint32 crc32c = 2;", "crc32c"),
            ("capture", "uint32 width = 6;", "uint32 hidden = 6;", "width"),
            ("site", "SITE_MLP_OUT = 4;", "", 'enum "Site"'),
            ("store", "rpc GetStats(GetStatsRequest) returns (GetStatsResponse);", "", "GetStats"),
            ("inference", "returns (stream GenerateResponse);", "returns (GenerateResponse);", "Generate"),
        ],
    )
    def test_a_breaking_change_is_refused_by_name(self, breaking, name, before, after, said):
        result = breaking(name, before, after)
        assert result.returncode != 0
        assert said in result.stdout

    def test_an_addition_is_allowed(self, breaking):
        result = breaking(
            "capture",
            "// Describes the payload of a chunk.\n",
            "// A new one.\nmessage New {}\n\n// Describes the payload of a chunk.\n",
        )
        assert result.returncode == 0, result.stdout


class TestPage:
    @staticmethod
    def generate(root, *arguments):
        command = [sys.executable, str(root / "scripts/generate_proto_docs.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_the_committed_page_is_fresh(self):
        result = self.generate(ROOT, "--check")
        assert result.returncode == 0, result.stderr

    def test_a_changed_comment_makes_the_page_stale_until_it_is_generated(self, copy):
        proto = copy / "protos/residuum/v1/capture.proto"
        comment = "// The sites to capture, distinct. Empty means SITE_RESID_POST."
        proto.write_text(proto.read_text().replace(comment, "// Any | of <these>.", 1))
        stale = self.generate(copy, "--check")
        assert stale.returncode == 1
        assert "make protos" in stale.stderr
        assert self.generate(copy).returncode == 0
        assert self.generate(copy, "--check").returncode == 0
        assert "| Any \\| of &lt;these>. |" in (copy / "docs/protos.md").read_text()

    def test_the_page_has_every_method_message_field_enum_and_value(self):
        modules = [importlib.import_module(f"residuum.v1.{path.stem}_pb2") for path in PROTOS]
        for file in (module.DESCRIPTOR for module in modules):
            for service in file.services_by_name.values():
                assert all(f"\n#### {method.name}\n" in PAGE for method in service.methods)
            for message in file.message_types_by_name.values():
                part = PAGE.partition(f"\n### {message.name}\n")[2].partition("\n### ")[0]
                assert all(f"\n| `{item.name}` = {item.number} |" in part for item in message.fields)
            for enum in file.enum_types_by_name.values():
                part = PAGE.partition(f"\n### {enum.name}\n")[2].partition("\n### ")[0]
                assert all(f"\n| `{value.name}` = {value.number} |" in part for value in enum.values)

    def test_the_links_of_the_page_have_targets(self):
        headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
        anchors = [heading.lower().replace(".", "").replace(" ", "-") for heading in headings]
        assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= set(anchors)
        linked = {name for name in anchors if PAGE.count(f"(#{name})")}
        assert all(anchors.count(name) == 1 for name in linked), "a link to a repeated heading is ambiguous"

    def test_the_page_has_every_description(self):
        assert not re.search(r"\|\s*\|\n(?!\| ---)", PAGE), "a field or value without a comment"


class TestErrors:
    """The contract names what a failed call carries, and which failures callers of a method must expect."""

    @staticmethod
    def comments():
        text = (ROOT / "protos/residuum/v1/errors.proto").read_text()
        return {name: comment for comment, name in re.findall(r"((?:  //.*\n)+)  (ERROR_REASON_\w+) =", text)}

    @staticmethod
    def metadata():
        """Yield the reason and each name in the metadata of the failures that the services make."""
        for path in (path for package in SERVICES for path in (ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(args=[ast.Attribute(attr=reason), *_]) if reason.startswith("ERROR_REASON_"):
                        yield from ((reason, keyword.arg) for keyword in node.keywords if keyword.arg)

    def test_the_metadata_of_every_failure_is_named(self):
        comments, found = self.comments(), set(self.metadata())
        assert ("ERROR_REASON_UNKNOWN_LAYER", "layer") in found
        assert {(reason, name) for reason, name in found if f"`{name}`" not in comments[reason]} == set()

    @pytest.mark.parametrize(
        ("service", "method", "reasons"),
        [
            ("inference", "RegisterRequest", ["PERMISSION_DENIED"]),
            ("inference", "Generate", ["QUOTA_EXCEEDED", "STORE_FULL", "PERMISSION_DENIED"]),
            ("store", "ListCaptures", ["PERMISSION_DENIED"]),
            ("store", "ReadChunks", ["ARCHIVE_UNREACHABLE"]),
            ("store", "Search", ["ARCHIVE_UNREACHABLE"]),
        ],
    )
    def test_a_method_lists_the_reasons_that_its_callers_handle(self, service, method, reasons):
        text = (ROOT / f"protos/residuum/v1/{service}.proto").read_text()
        comment = text.partition(f"  rpc {method}(")[0].rpartition("\n\n")[2]
        assert [reason for reason in reasons if reason not in comment] == []
