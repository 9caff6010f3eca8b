"""Which licences the distributions carry that each part of the project needs, as they are installed here.

    .venv/bin/python -m scripts.licences            list them; fail if the client or the store needs one not allowed
    .venv/bin/python -m scripts.licences --json

A licence is read from the package's own metadata: its SPDX expression, else its classifiers, else its free text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PARTS = {"client": (), "store": ("store",), "inference": ("cpu",)}
"""What is delivered, by the extras that it is installed with."""

GUARDED = ("client", "store")
"""Parts all of whose dependencies must carry an allowed licence. vLLM's own are vLLM's choice; they are listed."""

ALLOWED = frozenset(
    {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSD", "CC0-1.0", "ISC", "MIT", "OLDAP-2.8", "PSF-2.0"}
    | {"Unlicense", "Zlib"}
)

EXCEPTIONS = {
    # A library of its own, used as it is and loaded at run time, which is what the LGPL allows anyone to do.
    "crc32c": {"LGPL-2.1-or-later"},
}
"""Licences that single packages may carry besides."""

_NOT_HERE = {"torchaudio", "torchcodec", "torchvision"}
"""Left out on purpose; see requirements/cpu.lock."""

_CLASSIFIED = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.1-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}

_WRITTEN = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "isc license": "ISC",
    "mit license": "MIT",
}

_LONGEST_NAME = 60
"""Free text that is longer is a licence's text, not its name."""


@dataclass(frozen=True)
class Package:
    """A distribution that is needed."""

    name: str
    version: str
    licence: str
    """An SPDX expression where the package has one, or a name; empty: it says nothing."""
    needs: tuple[str, ...]
    """The packages that it needs in turn."""

    @property
    def licences(self) -> frozenset[str]:
        """The names in `licence`."""
        words = re.split(r"[()\s]+", self.licence)
        return frozenset(word for word in words if word and word not in {"AND", "OR", "WITH"})


def needed_by(part: str) -> list[Package]:
    """Return the distributions that a part needs, by name, without the project itself."""
    found: dict[str, tuple[set[str], set[str]]] = {}  # extras that were followed, and names that are needed
    todo = [("residuum", frozenset(PARTS[part]))]
    while todo:
        name, extras = todo.pop()
        followed, needs = found.setdefault(name, (set(), set()))
        if followed >= {*extras, ""}:
            continue
        followed.update({*extras, ""})
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            wanted = canonicalize_name(need.name)
            if wanted in _NOT_HERE:
                continue
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                needs.add(wanted)
                todo.append((wanted, frozenset(need.extras)))
    return [
        Package(name, metadata.version(name), licence_of(name), tuple(sorted(found[name][1])))
        for name in sorted(found.keys() - {"residuum"})
    ]


def licence_of(name: str) -> str:
    """Return the licence of an installed distribution, as far as its metadata tell."""
    about = metadata.metadata(name)
    if expressions := about.get_all("License-Expression"):
        return str(expressions[0])
    classified = [item.split(" :: ")[-1] for item in about.get_all("Classifier") or [] if item.startswith("License ::")]
    written = "".join(about.get_all("License") or [""]).strip()
    if 0 < len(written) <= _LONGEST_NAME and "\n" not in written:
        return _WRITTEN.get(written.lower(), written)
    return " OR ".join(_CLASSIFIED.get(item, item) for item in classified)


def not_allowed(packages: list[Package]) -> list[Package]:
    """Return the packages whose licence is not allowed, or not told. Of "A OR B" one is enough."""
    return [package for package in packages if not _is_allowed(package)]


def _is_allowed(package: Package) -> bool:
    allowed = ALLOWED | EXCEPTIONS.get(package.name, set())
    choices = [set(re.split(r"\s+AND\s+", choice.strip(" ()"))) for choice in package.licence.split(" OR ")]
    return any(choice <= allowed for choice in choices if choice != {""})


def main() -> int:
    """Print them, and tell whether all are allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    parts = {part: needed_by(part) for part in PARTS}
    if options.json:
        told = {part: [vars(package) for package in packages] for part, packages in parts.items()}
        print(json.dumps(told, indent=2))
    else:
        for part, packages in parts.items():
            print(f"{part}: {len(packages)} packages")
            for package in packages:
                print(f"  {package.name:38} {package.version:16} {package.licence or 'not told'}")
    refused = [(part, package) for part in GUARDED for package in not_allowed(parts[part])]
    for part, package in refused:
        print(
            f"{part} needs {package.name}, whose licence is not allowed: {package.licence or 'not told'}",
            file=sys.stderr,
        )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
