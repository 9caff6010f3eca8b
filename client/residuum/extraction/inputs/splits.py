"""The files of a table in a folder, and the splits of a dataset that their names tell."""

from __future__ import annotations

import re
from pathlib import Path

from residuum.exceptions import InvalidRequest
from residuum.protocol.caller import warn_caller

_SHARD = re.compile(r"(?P<split>.+)-\d{5,}(?P<version>-of-(?P<total>\d{5,})(?:-[0-9a-f]{16})?)")
"""The names of the files of a split on the Hugging Face hub, such as train-00000-of-00002."""
_WORDS = frozenset(("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"))
"""Words that name a split."""
_MOST_NAMED = 8
"""The most splits that a message names."""


def files_of_folder(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, or else its Arrow files, in the order of their names; empty without any.

    Raises:
        InvalidRequest: They are of several splits, whose rows should not be mixed, or of two versions of a split.
    """
    found = _tables(folder)
    splits = dict.fromkeys(map(_split_of, found))
    if len(splits) > 1:
        names = [split for split in splits if split is not None]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        others = next((f", and other files, such as {file.name}" for file in found if _split_of(file) is None), "")
        advised = next((name for name in names if not (folder / name).exists()), names[0])
        kind = "splits" if len(names) > 1 else "split"
        raise InvalidRequest(
            f"{folder} has files of the {kind} {', '.join(names[:_MOST_NAMED])}{more}{others}. Their rows should not "
            f"be mixed. Name one split, such as {folder / advised}, and run a job for each that you want.",
            reason="INVALID_FIELD",
        )
    _check_split(found)
    return found


def files_of_split(path: Path) -> list[Path]:
    """Return the files of a split that is named as if it were a folder, such as data/train; empty if there are none.

    Raises:
        InvalidRequest: They are of two versions of the split.
    """
    found = [file for file in _tables(path.parent) if _split_of(file) == path.name]
    _check_split(found)
    return found


def _check_split(files: list[Path]) -> None:
    """Refuse files of two versions of a split, and warn if some of the split's files are missing."""
    shards = [_SHARD.fullmatch(file.stem) for file in files]
    versions = {shard["version"] if shard else "": file for shard, file in zip(shards, files, strict=True)}
    if len(versions) > 1:
        one, other, *_ = versions.values()
        raise InvalidRequest(
            f"{one.parent} has two versions of the split {_split_of(one)}: {one.name} is of one, {other.name} of the "
            "other. Rows would be there twice. Keep the files of one version, and move the others to another folder.",
            reason="INVALID_FIELD",
        )
    total = int(shards[0]["total"]) if shards and shards[0] else len(files)  # without numbers, nothing tells how many
    if len(files) != total:
        warn_caller(
            f"By their names, the split {_split_of(files[0])} in {files[0].parent} has {len(files)} of {total} files. "
            "The job reads these. To read all, stop it and download the others."
        )


def _tables(folder: Path) -> list[Path]:
    for suffix in (".parquet", ".arrow"):
        if found := sorted(file for file in folder.glob("*" + suffix) if file.is_file()):
            return found
    return []


def _split_of(file: Path) -> str | None:
    """Return the split that a file's name tells, such as "train" or "wikitext-train"; None if it tells none."""
    shard = _SHARD.fullmatch(file.stem)
    if shard:
        return shard[1]
    return None if _WORDS.isdisjoint(re.split(r"[^a-z]+", file.stem.lower())) else file.stem
