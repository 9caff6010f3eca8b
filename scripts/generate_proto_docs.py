"""Write docs/protos.md, the reference of the contract, from protos/ and the comments in them.

    .venv/bin/python scripts/generate_proto_docs.py            write it
    .venv/bin/python scripts/generate_proto_docs.py --check    fail if the committed page is not this one

Comments become Markdown as they stand: paragraphs, lists, and what is indented by two characters or more as a block of
code. Types link to where they are described. The page is plain Markdown, for any renderer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PAGE = ROOT / "docs" / "protos.md"

INTRODUCTION = """\
# The contract

<!-- Made by scripts/generate_proto_docs.py from protos/ (`make protos`); change the comments there, not this page. -->

Package `{package}`, for any language: [{folder}](../{folder}) is one [buf](https://buf.build) module.
[examples/languages](../examples/languages/README.md) has whole programs in TypeScript, Go and C++, and one that needs
no stubs. `make check-protos` refuses a change that breaks callers of the contract as it was released
(`protos/contract.binpb`).
"""

# The order in which a reader meets things; a file that is not named comes last.
ORDER = ("inference", "store", "capture", "steering", "selection", "tensor", "placement", "errors")

Path_ = tuple[int, ...]  # of a descriptor in its file, as google.protobuf.SourceCodeInfo counts
_LABEL_REPEATED = FieldDescriptorProto.LABEL_REPEATED
_FILE_SYNTAX = FileDescriptorProto.SYNTAX_FIELD_NUMBER
_FILE_SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
_FILE_MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
_FILE_ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
_SERVICE_METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER
_MESSAGE_FIELDS = DescriptorProto.FIELD_FIELD_NUMBER
_MESSAGE_NESTED = DescriptorProto.NESTED_TYPE_FIELD_NUMBER
_MESSAGE_ENUMS = DescriptorProto.ENUM_TYPE_FIELD_NUMBER
_MESSAGE_ONEOFS = DescriptorProto.ONEOF_DECL_FIELD_NUMBER
_ENUM_VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER


def main() -> int:
    """Write or compare; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only, and fail on any difference")
    options = parser.parse_args()
    text = page(compile_protos())
    fresh = PAGE.exists() and PAGE.read_text() == text
    name = PAGE.relative_to(ROOT)
    if options.check:
        if not fresh:
            print(f"{name} is not what protos/ says\nrun `make protos` and commit what it writes", file=sys.stderr)
            return 1
        print(f"{name} is fresh")
        return 0
    PAGE.write_text(text)
    print(f"{name}: {'unchanged' if fresh else 'written'}")
    return 0


def compile_protos() -> list[FileDescriptorProto]:
    """Return the files of the contract with their comments, in the order of the page."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info"]
        command += [f"--descriptor_set_out={image}", *map(str, sorted(PROTOS.glob("residuum/**/*.proto")))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(f"protoc failed:\n{result.stderr}")
        files = FileDescriptorSet.FromString(image.read_bytes()).file

    def place(file: FileDescriptorProto) -> tuple[int, str]:
        name = Path(file.name).stem
        return (ORDER.index(name) if name in ORDER else len(ORDER)), name

    return sorted(files, key=place)


def page(files: list[FileDescriptorProto]) -> str:
    """Return the page as Markdown."""
    package = files[0].package
    writer = Writer(known_names(files))
    lines = [INTRODUCTION.format(package=package, folder=f"protos/{package.replace('.', '/')}")]
    lines += contents(files)
    for file in files:
        lines += writer.file(file)
    return "\n".join(lines).rstrip() + "\n"


def known_names(files: Iterable[FileDescriptorProto]) -> dict[str, str]:
    """Return the name on the page of every message and enum, by its full name with a leading dot."""
    names: dict[str, str] = {}

    def add(prefix: str, message: DescriptorProto) -> None:
        names[f"{prefix}.{message.name}"] = message.name
        names.update({f"{prefix}.{message.name}.{enum.name}": enum.name for enum in message.enum_type})
        for nested in message.nested_type:
            add(f"{prefix}.{message.name}", nested)

    for file in files:
        names.update({f".{file.package}.{enum.name}": enum.name for enum in file.enum_type})
        for message in file.message_type:
            add(f".{file.package}", message)
    return names


def contents(files: list[FileDescriptorProto]) -> Iterator[str]:
    """Yield a list of the files, and what each says of itself."""
    for file in files:
        yield f"* {link(Path(file.name).name)}: {cell(file_comment(file))}"
    yield ""


def file_comment(file: FileDescriptorProto) -> str:
    """Return the comment at the head of a file: an empty line sets it apart from `syntax`."""
    for item in file.source_code_info.location:
        if tuple(item.path) == (_FILE_SYNTAX,):
            return "".join(item.leading_detached_comments)
    return ""


@dataclass
class Writer:
    """Turns descriptors into Markdown."""

    names: dict[str, str]
    """Full name -> name on the page, of what the page describes."""
    _comments: dict[Path_, str] = field(default_factory=dict)

    def file(self, file: FileDescriptorProto) -> Iterator[str]:
        """Yield the lines of a file's part."""
        self._comments = {tuple(item.path): item.leading_comments for item in file.source_code_info.location}
        yield f"## {Path(file.name).name}\n"
        yield from markdown(file_comment(file))
        for number, service in enumerate(file.service):
            yield from self._service(service, (_FILE_SERVICES, number))
        for number, message in enumerate(file.message_type):
            yield from self._message(message, (_FILE_MESSAGES, number))
        for number, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (_FILE_ENUMS, number))

    def _service(self, service: ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {service.name}\n"
        yield from self._comment(path)
        for number, method in enumerate(service.method):
            yield f"#### {method.name}\n"
            yield self._signature(method) + "\n"
            yield from self._comment((*path, _SERVICE_METHODS, number))

    def _signature(self, method: MethodDescriptorProto) -> str:
        takes = ("stream of " if method.client_streaming else "") + self._link(method.input_type)
        gives = ("stream of " if method.server_streaming else "") + self._link(method.output_type)
        return f"{takes} → {gives}"

    def _message(self, message: DescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {message.name}\n"
        yield from self._comment(path)
        if message.field:
            yield "| field | type | |\n| --- | --- | --- |"
            for number, item in enumerate(message.field):
                yield self._field(message, item, (*path, _MESSAGE_FIELDS, number))
            yield ""
        for number, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # those stand for `optional`
                said = cell(self._comments.get((*path, _MESSAGE_ONEOFS, number), ""))
                yield f"One of `{oneof.name}` at most is set: {said}\n"
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _MESSAGE_NESTED, number))
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _MESSAGE_ENUMS, number))

    def _field(self, message: DescriptorProto, item: FieldDescriptorProto, path: Path_) -> str:
        kind = self._kind(item)
        if item.proto3_optional:
            kind = f"optional {kind}"
        elif item.label == _LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif item.HasField("oneof_index"):
            kind += f", of `{message.oneof_decl[item.oneof_index].name}`"
        return f"| `{item.name}` = {item.number} | {kind} | {cell(self._comments.get(path, ''))} |"

    def _kind(self, item: FieldDescriptorProto) -> str:
        if item.type_name:
            return self._link(item.type_name)
        return FieldDescriptorProto.Type.Name(item.type).removeprefix("TYPE_").lower()

    def _enum(self, enum: EnumDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {enum.name}\n"
        yield from self._comment(path)
        yield "| value | |\n| --- | --- |"
        for number, value in enumerate(enum.value):
            said = cell(self._comments.get((*path, _ENUM_VALUES, number), ""))
            yield f"| `{value.name}` = {value.number} | {said} |"
        yield ""

    def _comment(self, path: Path_) -> Iterator[str]:
        yield from markdown(self._comments.get(path, ""))

    def _link(self, full_name: str) -> str:
        if full_name in self.names:
            return link(self.names[full_name])
        name = full_name.lstrip(".")
        if name.startswith("google.protobuf."):
            page = "https://protobuf.dev/reference/protobuf/google.protobuf/"
            return f"[{name}]({page}#{anchor(name.rpartition('.')[2])})"
        return f"`{name}`"


def markdown(comment: str) -> Iterator[str]:
    """Yield a comment as Markdown: what is indented becomes a block of code, lists are set apart."""
    for block in re.split(r"\n[ \t]*\n", comment.strip("\n")):
        lines = [line.removeprefix(" ").rstrip() for line in block.splitlines()]
        if not any(lines):
            continue
        if all(line.startswith("  ") for line in lines):
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            yield "\n".join(["```text", *(line[indent:] for line in lines), "```", ""])
            continue
        out: list[str] = []
        for line in lines:
            if line.startswith("* ") and out and not out[-1].startswith(("* ", "  ")):
                out.append("")
            out.append(escaped(line))
        yield "\n".join([*out, ""])


def cell(comment: str) -> str:
    """Return a comment as one line of a table."""
    return escaped(" ".join(comment.split())).replace("|", "\\|")


def escaped(text: str) -> str:
    """Return text in which nothing looks like HTML; code is left as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def link(name: str) -> str:
    """Return a link to where a name of the contract is described."""
    return f"[{name}](#{anchor(name)})"


def anchor(heading: str) -> str:
    """Return the anchor that renderers give a heading of letters, digits and dots."""
    return re.sub(r"[^a-z0-9_-]", "", heading.lower())


if __name__ == "__main__":
    sys.exit(main())
