"""Tokens files for tests."""

from __future__ import annotations

import datetime
from pathlib import Path

from residuum.wire.tokens import make_token, token_hash


class Tokens:
    """A tokens file and its tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def add(self, tenant: str, *rights: str, days: float | None = None) -> str:
        token = make_token()
        entry = f'[[token]]\nhash = "{token_hash(token)}"\ntenant = "{tenant}"\nrights = {list(rights)!r}\n'
        if days is not None:
            expires = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
            entry += f"expires = {expires.isoformat()}\n"
        self.append(entry)
        return token

    def limit(self, tenant: str, **limits: object) -> None:
        lines = "".join(f"{name} = {value!r}\n" for name, value in limits.items())
        self.append(f"[tenant.{tenant}]\n{lines}")

    def append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def replace(self, text: str) -> None:
        """Replace the file by another with the same name, as editors and mounts do."""
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
