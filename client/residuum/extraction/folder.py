"""The output folder of a job: what the job is, the shards that are on the disk, and the log of its runs.

    job.json                   the job's document, the model, and the versions at the start
    rows-00000.safetensors     the rows of the first prompts
    prompts-00000.jsonl        one line for each of these prompts
    index.json                 all shards, for readers
    log.jsonl                  when the job ran, and how fast; no other file depends on time

A shard is on the disk when its file of rows has its name: it is written under another name, synced and renamed after
the file of its prompts. Which prompts a shard has depends only on the prompts, so a killed job makes the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from residuum.exceptions import InvalidRequest
from residuum.extraction.shards import FORMAT, Shard, ShardInfo, kind_text, read_info, read_prompts
from residuum.extraction.spec import ROWS, differences, digest_of
from residuum.transport.progress import size

JOB, INDEX, LOG = "job.json", "index.json", "log.jsonl"
_PART = ".part"


class JobFolder:
    """The output folder of a job that runs. Only one process may have it open."""

    def __init__(self, path: Path) -> None:
        """Use `open_folder` instead."""
        self.path = path
        self.shards: list[ShardInfo] = []
        """The shards on the disk."""
        self.job_id = ""
        """The start of the names of the job's captures."""
        self.replaced_id = ""
        """The `job_id` of another job that the folder had, which has not written any rows."""
        self._prepared: dict[int, ShardInfo] = {}
        """The shards that are written under temporary names, by number."""

    @property
    def done(self) -> int:
        """The number of prompts in the shards."""
        return sum(shard.prompts for shard in self.shards)

    def begin(self, document: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Start the job, or continue it. It replaces another job that has no shard.

        Args:
            document: What the job does.
            facts: The versions, for people.

        Raises:
            InvalidRequest: The folder has another job; the message says what differs. Or its job.json is not of a job.
            FileExistsError: The folder has other files.
        """
        job = self.path / JOB
        if job.is_file():
            self.shards = list(shards_in(self.path))
            before = read_spec(self.path)
            if ROWS in document and ROWS not in before:  # an earlier version did not note the dtype, but files have it
                before = {**before, ROWS: {**document[ROWS], **_dtype_of(self.shards)}}
            changed = differences(before, json.loads(json.dumps(document, default=str)))
            if changed and not self.shards:
                self._replace(job, document, facts)
            elif changed:
                from_service = any(change.startswith(f"{ROWS}.") for change in changed)
                as_it_was = " with a service of the same dtype and default encoding" if from_service else ""
                raise InvalidRequest(
                    f"{self.path} has another job: {'; '.join(changed)}. Run the job as it was{as_it_was}, or choose "
                    "another folder.",
                    reason="INVALID_FIELD",
                )
        else:
            (self.path / f"{job.name}{_PART}").unlink(missing_ok=True)  # of a start that was killed, or had no room
            others = sorted(item.name for item in self.path.iterdir())
            if others:
                raise FileExistsError(
                    f"{self.path} is a folder with other files, such as {others[0]}. Choose an empty folder, or one "
                    "that does not exist."
                )
            _write_job(job, document, facts)
        for left_over in self.path.glob(f"*{_PART}"):
            if left_over.is_file():  # a folder is a part of an export
                left_over.unlink()
        self.job_id = self._id()

    def _replace(self, job: Path, document: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Replace the job of the folder, which has no shard."""
        if (self.path / LOG).is_file() and not self.has_kept_captures():
            self.replaced_id = self._id()
        for name in (LOG, INDEX):
            (self.path / name).unlink(missing_ok=True)
        _write_job(job, document, facts)

    def digests(self) -> Iterator[str]:
        """Yield the digest of each prompt in the shards, in order."""
        for shard in self.shards:
            for line in read_prompts(self.path, shard):
                yield line["sha256"]

    def prepare(self, shard: Shard) -> None:
        """Write and sync the files of a shard under other names. Several threads may do so at once.

        Raises:
            OSError: They cannot be written. None of them is left.
        """
        rows, prompts = self._parts(shard)
        try:
            info = shard.write(rows, prompts)
            _sync(prompts)
            _sync(rows)
        except BaseException as error:
            self.discard(shard)
            if isinstance(error, OSError):
                raise _with_room(error, self.path, shard.bytes) from None
            raise
        self._prepared[shard.number] = info

    def discard(self, shard: Shard) -> None:
        """Delete the files of a shard that has not been committed."""
        self._prepared.pop(shard.number, None)
        for part in self._parts(shard):
            part.unlink(missing_ok=True)

    def commit(self, shard: Shard, total: int) -> ShardInfo:
        """Add a shard, so that it survives a crash of the process or of the machine. Write it if it is not prepared.

        Args:
            shard: The rows.
            total: The number of prompts of the whole job.

        Raises:
            OSError: The shard cannot be written. The files on the disk are those from before.
        """
        if shard.number not in self._prepared:
            self.prepare(shard)
        rows, prompts = self._parts(shard)
        info = self._prepared[shard.number]
        try:
            prompts.replace(self.path / info.prompts_file)
            rows.replace(self.path / info.rows_file)
            _sync(self.path)
        except OSError as error:
            self.discard(shard)
            raise _with_room(error, self.path, shard.bytes) from None
        del self._prepared[shard.number]
        self.shards.append(info)
        self.write_index(total)
        return info

    def write_index(self, total: int) -> None:
        """Write the list of the shards."""
        _write_json(self.path / INDEX, index_of(self.shards, total))

    def log(self, event: str, **facts: Any) -> None:
        """Add a line to the log."""
        try:
            with (self.path / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **facts}) + "\n")
        except OSError as error:
            raise _with_room(error, self.path, 0) from None

    def has_kept_captures(self) -> bool:
        """Return whether a run of the job, this one included, was told to keep its captures."""
        with (self.path / LOG).open(encoding="utf-8") as file:
            return any('"keep_captures": true' in line for line in file)

    def _parts(self, shard: Shard) -> tuple[Path, Path]:
        """Return the files of rows and of prompts before they have their names."""
        rows, prompts = (self.path / f"{kind}-{shard.number:05}{_PART}" for kind in ("rows", "prompts"))
        return rows, prompts

    def _id(self) -> str:
        """Return the job's own ID: that of the log's first line, or a new one."""
        log = self.path / LOG
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            name = json.loads(log.read_text(encoding="utf-8").splitlines()[0])["job"]
            if isinstance(name, str):
                return name
        log.unlink(missing_ok=True)
        name = f"extract-{uuid.uuid4().hex[:12]}"
        self.log("job", job=name)
        _sync(log)
        _sync(self.path)
        return name


@contextlib.contextmanager
def open_folder(path: str | os.PathLike[str]) -> Iterator[JobFolder]:
    """Open the folder of a job, and keep other processes from running the same job meanwhile.

    Raises:
        InvalidRequest: The path is a URL.
        FileExistsError: The path is a file, or another process runs this job.
        OSError: The folder cannot be created, or one may not write there.
    """
    folder = Path(path)
    if "://" in os.fspath(path):
        raise InvalidRequest(
            f"The output {os.fspath(path)} is a URL. Name a local folder, or compute on a Ray cluster "
            "(residuum extract --ray), which writes to URLs.",
            reason="INVALID_FIELD",
        )
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. The output is a folder: choose another path.")
    missing = [item for item in (folder, *folder.parents) if not item.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for new in missing:  # the name of a new folder is in the folder above it
            _sync(new.parent)
    except OSError as error:
        raise type(error)(f"The folder {folder} cannot be created: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"You may not write to the folder {folder}. Choose another one.")
    with _locked(folder):
        yield JobFolder(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"Another process runs the job in {folder}. Wait until it has ended, or choose another folder."
            ) from None
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(handle)


def shards_in(folder: Path) -> Iterator[ShardInfo]:
    """Yield the shards of a folder in order.

    Raises:
        InvalidRequest: One is missing or damaged, does not follow the one before it, or has rows of another kind.
    """
    number = prompts = 0
    kinds: dict[str, tuple[str, int]] = {}
    while (path := folder / f"rows-{number:05}.safetensors").is_file():
        info = read_info(path)
        if (info.number, info.first_prompt) != (number, prompts) or not (folder / info.prompts_file).is_file():
            raise InvalidRequest(
                f"{path} does not follow the shard before it. Delete it and those after it, and run the job again.",
                reason="INVALID_FIELD",
            )
        for name, kind in info.tensors.items():
            first = kinds.setdefault(name, kind)
            if kind != first:
                raise InvalidRequest(
                    f"{path} has rows of {name} that are {kind_text(kind)}, and the files before it have "
                    f"{kind_text(first)}: the job continued on another service. Delete it and those after it, and run "
                    "the job again with the first service.",
                    reason="INVALID_FIELD",
                )
        yield info
        number, prompts = number + 1, prompts + info.prompts
    later = min((item.name for item in folder.glob("rows-*.safetensors") if item.name > path.name), default=None)
    if later is not None:
        raise InvalidRequest(
            f"{path} is missing, although {later} is there. Restore it, or delete the later files and run the job "
            "again: it computes their prompts again.",
            reason="INVALID_FIELD",
        )


def _dtype_of(shards: Iterable[ShardInfo]) -> dict[str, str]:
    """Return the dtype of the rows in files; nothing without rows."""
    return next(({"dtype": dtype} for shard in shards for dtype, _ in shard.tensors.values()), {})


def index_of(shards: Sequence[ShardInfo], total: int) -> dict[str, Any]:
    """Return the content of index.json."""
    tensors = {name: kind for shard in shards for name, kind in shard.tensors.items()}
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in _SUMS}
    return {
        "format": FORMAT,
        "complete": sums["prompts"] == total,
        "total_prompts": total,
        **sums,
        "tensors": {name: {"dtype": dtype, "width": width} for name, (dtype, width) in sorted(tensors.items())},
        "shards": [
            {
                "rows_file": shard.rows_file,
                "prompts_file": shard.prompts_file,
                "first_prompt": shard.first_prompt,
                **{name: getattr(shard, name) for name in _SUMS},
            }
            for shard in shards
        ],
    }


_SUMS = tuple(
    field.name for field in dataclasses.fields(ShardInfo) if field.name not in {"number", "first_prompt", "tensors"}
)


def _write_job(path: Path, document: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    _write_json(path, {"format": FORMAT, "spec": document, "spec_sha256": digest_of(document), **facts})


def read_spec(folder: Path) -> dict[str, Any]:
    """Return what the job of a folder does.

    Raises:
        InvalidRequest: The file that says so is damaged, or of another program.
    """
    path = folder / JOB
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidRequest(
            f"{path} is damaged, or of another program. Choose another folder, or delete this one if you do not need "
            "its files.",
            reason="INVALID_FIELD",
        )
    spec: dict[str, Any] = document["spec"]
    return spec


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file that is either whole or as before."""
    part = path.with_name(f"{path.name}{_PART}")
    try:
        part.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
        _sync(part)
        part.replace(path)
        _sync(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _with_room(error, path.parent, 0) from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _with_room(error: OSError, folder: Path, needed: int) -> OSError:
    """Return the error of a failed write, with what to do."""
    needs = f" The shard takes {size(needed)}." if needed else ""
    found = OSError(
        f"The job cannot write to {folder}: {error.strerror or error}.{needs} Correct this, and run the same job "
        "again: it continues after the last shard."
    )
    found.errno = error.errno
    return found
