"""Check or fetch the JavaScript libraries of `residuum ui`, which are committed so that nobody needs a build step.

.venv/bin/python scripts/vendor_ui.py            check that the committed files are those of the manifest
.venv/bin/python scripts/vendor_ui.py --fetch    fetch them from npm again, and write the files and their hashes

To update a library, change its version and its integrity (`npm view NAME@VERSION dist.integrity`) in the manifest,
client/residuum/ui/static/vendor/manifest.json, and fetch. The only change to a file is that imports name files.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "client/residuum/ui/static/vendor"
MANIFEST = FOLDER / "manifest.json"

Entries = dict[str, dict[str, str]]


def main() -> None:
    """Check the files, or fetch them first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="fetch the files from npm (default: only check them)")
    options = parser.parse_args()
    entries: Entries = json.loads(MANIFEST.read_text())
    if options.fetch:
        fetch(entries)
        MANIFEST.write_text(json.dumps(entries, indent=2) + "\n")
    wrong = problems(entries)
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(entries)} files are as {MANIFEST.name} says")


def problems(entries: Entries) -> list[str]:
    """Return one line for each file that differs from its entry, is missing, or has no entry."""
    found = {file.name for file in FOLDER.iterdir()} - {MANIFEST.name}
    lines = [f"{name} has no entry in {MANIFEST.name}" for name in sorted(found - entries.keys())]
    for name, entry in entries.items():
        if name not in found:
            lines.append(f"{name} is missing: run scripts/vendor_ui.py --fetch")
        elif (digest := sha256((FOLDER / name).read_bytes())) != entry["sha256"]:
            lines.append(f"{name} has the SHA-256 {digest}, but {MANIFEST.name} says {entry['sha256']}")
    return lines


def fetch(entries: Entries) -> None:
    """Write each file from its package, and its hash into its entry."""
    for entry in entries.values():
        entry["sha256"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        for name, entry in entries.items():
            with tarfile.open(package(entry, Path(scratch))) as archive:
                member = archive.extractfile(entry["member"])
                if member is None:
                    sys.exit(f"{entry['package']} {entry['version']} has no file {entry['member']}")
                content = adapted(member.read()) if name.endswith(".js") else member.read()
            (FOLDER / name).write_bytes(content)
            entry["sha256"] = sha256(content)


def package(entry: dict[str, str], folder: Path) -> Path:
    """Return the package's archive, once its content has the integrity that the manifest demands."""
    path = folder / f"{entry['package']}-{entry['version']}.tgz"
    if not path.exists():
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder)]
        subprocess.run([*command, f"{entry['package']}@{entry['version']}"], check=True, stdout=subprocess.DEVNULL)
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != entry["integrity"]:
        sys.exit(f"{path.name} has the integrity sha512-{digest}, but {MANIFEST.name} demands {entry['integrity']}")
    return path


def adapted(content: bytes) -> bytes:
    """Return a module whose imports name files, as browsers need without an import map, and without a source map."""
    text = re.sub(r'from ?"preact"', 'from"./preact.js"', content.decode())
    return re.sub(r"\n?//# sourceMappingURL=.*\n?", "\n", text).encode()


def sha256(content: bytes) -> str:
    """Return a digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
