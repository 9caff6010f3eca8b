"""Reads the version from the client's pyproject.toml, its only place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ServerMetadata(MetadataHookInterface):
    """Fills in the dynamic fields of this folder's pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the version and the dependencies; an sdist brings both along."""
        root = Path(self.root)
        if (root / "PKG-INFO").exists():
            return
        found = re.search(r'^version = "([^"]+)"', (root.parent / "pyproject.toml").read_text(), re.MULTILINE)
        if found is None:
            raise ValueError("../pyproject.toml has no version")
        metadata["version"] = found[1]
        metadata["dependencies"] = [f"residuum=={found[1]}", *self.config["dependencies"]]
