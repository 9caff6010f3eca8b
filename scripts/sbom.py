"""Write bills of materials (SBOM) in CycloneDX's JSON: what is delivered with each part, in which version and licence.

    .venv/bin/python -m scripts.sbom [--out FOLDER]      client.cdx.json, store.cdx.json, inference.cdx.json

They list the Python distributions as they are installed here, from the locks. What an image has besides, from Debian or
from its base, a scanner of images tells.
"""

from __future__ import annotations

import argparse
import os
import uuid
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts.licences import PARTS, Package, needed_by

ROOT = Path(__file__).resolve().parent.parent


def document(part: str) -> str:
    """Return the bill of materials of a part, a key of `PARTS`.

    It is the same each time for the same packages, but for its date, which SOURCE_DATE_EPOCH fixes.
    """
    packages = needed_by(part)
    components = {package.name: _component(package) for package in packages}
    bom = Bom(components=components.values())
    bom.metadata.timestamp = datetime.fromtimestamp(_now(), timezone.utc)
    bom.metadata.component = _ourselves(part)
    named = ",".join(f"{package.name}@{package.version}" for package in packages)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"residuum/{part}@{metadata.version('residuum')}:{named}")
    bom.register_dependency(bom.metadata.component, list(components.values()))
    for package in packages:
        bom.register_dependency(components[package.name], [components[name] for name in package.needs])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _ourselves(part: str) -> Component:
    version = metadata.version("residuum")
    return Component(
        name="residuum" if part == "client" else f"residuum-{part}",
        version=version,
        type=ComponentType.APPLICATION if PARTS[part] else ComponentType.LIBRARY,
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
        bom_ref=f"residuum-{part}",
    )


def _component(package: Package) -> Component:
    url = PackageURL("pypi", name=package.name, version=package.version)
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        licenses=[LicenseFactory().make_from_string(package.licence)] if package.licence else [],
        purl=url,
        bom_ref=str(url),
    )


def _now() -> float:
    return float(os.environ.get("SOURCE_DATE_EPOCH") or datetime.now(timezone.utc).timestamp())


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where to (default: dist)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        path = options.out / f"{part}.cdx.json"
        path.write_text(document(part))
        print(f"{path}: {len(needed_by(part))} packages")


if __name__ == "__main__":
    main()
