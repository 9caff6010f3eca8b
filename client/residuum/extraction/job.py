"""Starts and continues jobs: what `Client.extract` and `residuum extract` call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol

from residuum._async.client import AsyncClient
from residuum.exceptions import EmptyCaptureWarning, InvalidRequest
from residuum.extraction.folder import JobFolder, open_folder
from residuum.extraction.inputs.packing import PackedItems
from residuum.extraction.inputs.prompts import Item, Items, Source, digest, open_rows
from residuum.extraction.inputs.tokenizer import Tokenizer
from residuum.extraction.progress import show_progress, show_reading
from residuum.extraction.results.reader import Extracted, ExtractSummary
from residuum.extraction.running.prompt_sender import PromptSender
from residuum.extraction.running.runner import Runner, clean_up
from residuum.extraction.running.services import Services
from residuum.extraction.spec import JobSpec, OnError
from residuum.protocol.arguments import check_flag, check_list, check_texts
from residuum.protocol.caller import note_caller, warn_caller
from residuum.protocol.deadlines import call_seconds
from residuum.protocol.requests import stored_rows
from residuum.transport.batches import check_concurrency
from residuum.values.model.info import ModelInfo
from residuum.values.steering.operation_list import operation_list

_SIGNAL_SECONDS = 0.5
"""How long Ctrl-C may go unnoticed."""

_PAUSE_PROMPTS = 64
"""How many prompts are checked between two pauses."""

_DISCARD_PAUSES = (0.0, 0.2, 1.0)
"""Seconds before each attempt to delete what a stopped sample has left: its last requests may still open captures."""


class HasSettings(Protocol):
    """Either client."""

    endpoint: str
    settings: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """A job, and how to run it. Only `source`, `folder` and `spec` decide what it makes."""

    source: Source
    folder: str | os.PathLike[str]
    spec: JobSpec
    on_error: OnError = "stop"
    keep_captures: bool = False
    timeout: float | None = None
    max_concurrency: int | None = None
    progress: bool = True
    lines: bool = False
    """Whether to print plain lines where there is no terminal."""
    is_sample: bool = False
    """Whether the job never continues, so that its captures are deleted even if it stops."""

    def items(self) -> Items | PackedItems:
        """Return the prompts. Those that are packed are not cut yet; see `cut`.

        Raises:
            InvalidRequest: An argument is invalid, or the input is empty or of an unknown kind.
            OSError: The input cannot be read.
        """
        self.spec.check()
        if self.max_concurrency is not None:
            check_concurrency(self.max_concurrency)
        call_seconds(self.timeout)
        check_flag("keep_captures", self.keep_captures)
        check_flag("progress", self.progress)
        if self.on_error not in {"stop", "skip"}:
            raise InvalidRequest(f"on_error={self.on_error!r} does not exist. Choose 'stop' or 'skip'.")
        spec = self.spec
        tokenizer = None if spec.tokenizer is None else Tokenizer(spec.tokenizer)
        separator = spec.separator
        if isinstance(separator, str):
            separator = None if tokenizer is None else tokenizer.special(separator)
        rows = open_rows(self.source, spec.column, spec.keep)
        limit = None if spec.pack else spec.limit
        items = Items(rows, column=spec.column, keep=spec.keep, chat=spec.chat, limit=limit, shuffle=spec.shuffle)
        if not spec.pack or spec.context_length is None:
            return items
        return PackedItems(
            items, length=spec.context_length, separator=separator, tokenizer=tokenizer, limit=spec.limit,
            on_error=self.on_error,
        )  # fmt: skip

    def document(self, items: Items | PackedItems, info: ModelInfo) -> dict[str, Any]:
        """Return everything that decides which rows the job makes; see `JobSpec.document`."""
        packing: dict[str, Any] = {}
        if isinstance(items, PackedItems):
            packing = {"pack": True, "separator": items.separator}
            if items.tokenizer is not None:
                packing["tokenizer_sha256"] = items.tokenizer.sha256
        return self.spec.document(len(items), info, packing)


def cut(job: Job, items: Items | PackedItems) -> Iterator[None]:
    """Cut packed prompts into windows, with pauses for other work. The others need no cutting."""
    if not isinstance(items, PackedItems):
        return
    with show_reading(items.num_documents, enabled=job.progress, lines=job.lines) as report:
        for read in items.cut():
            report(read)
            yield


def job_of(
    client: HasSettings,
    source: Source,
    folder: str | os.PathLike[str],
    spec: Mapping[str, Any],
    endpoints: Iterable[str],
    **options: Any,
) -> tuple[Job, Callable[[], Sequence[AsyncClient]]]:
    """Return a job, and a function that makes a client for each service.

    Args:
        client: The caller's client. The others get its settings.
        source: The prompts.
        folder: The output.
        spec: The fields of `JobSpec`; `keep` may be one text.
        endpoints: The further services.
        options: The further fields of `Job`.

    Raises:
        InvalidRequest: The client has no inference service.
    """
    if not client.endpoint:
        raise InvalidRequest(
            "This client has no inference service: it was created with store= alone. To extract, create a client with "
            "the endpoint of an inference service.",
            reason="INVALID_FIELD",
        )
    names = list(dict.fromkeys([client.endpoint, *check_list("endpoints", endpoints, "endpoints")]))
    fixed = {"keep": names_of(spec["keep"]), "steer": operation_list(spec["steer"])}  # both may be iterators
    job = Job(source, folder, JobSpec(**{**spec, **fixed}), **options)
    return job, lambda: [AsyncClient(name, **client.settings()) for name in names]


async def run_job(job: Job, clients: Callable[[], Sequence[AsyncClient]]) -> Extracted:
    """Run a job in this event loop.

    Args:
        job: The job.
        clients: Makes a client for each inference service. They are closed at the end.
    """
    with (
        note_caller(),
        contextlib.closing(await asyncio.to_thread(job.items)) as items,  # it reads where the lines of a file begin
        open_folder(job.folder) as folder,
    ):
        await _with_pauses(cut(job, items))
        services = Services(clients(), job.max_concurrency, job.timeout)
        try:
            await services.begin(job.spec.capture)
            job = replace(job, spec=await with_stored_rows(job.spec, services))
            folder.begin(job.document(items, services.info), _facts(services))
            if folder.replaced_id:
                await clean_up(services.all, folder.replaced_id, keep_captures=False)
            await _with_pauses(_check_prompts(folder, items))
            summary = await _run(job, items, folder, services)
        finally:
            await services.close()
    extracted = Extracted(job.folder)
    extracted.summary = summary
    _warn_if_no_rows(extracted)
    return extracted


def _warn_if_no_rows(extracted: Extracted) -> None:
    summary = extracted.summary
    if summary is None or not summary.prompts or len(extracted):
        return
    why = "No prompt has any of the selected positions, so there are no rows. Check the positions of `capture`."
    if summary.failed == summary.prompts:
        why = "All prompts failed, so there are no rows. `failures` has the reasons."
    warn_caller(why, EmptyCaptureWarning)


@note_caller()
def run_in_thread(job: Job, clients: Callable[[], Sequence[AsyncClient]]) -> Extracted:
    """Run a job in an event loop of its own, in another thread, so that it works inside a running loop, too.

    Ctrl-C stops the job and raises KeyboardInterrupt.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="residuum-extract", daemon=True)
    thread.start()
    task = asyncio.run_coroutine_threadsafe(run_job(job, clients), loop)
    try:
        while not task.done():  # a signal that comes as a wait without limit begins would interrupt nothing
            concurrent.futures.wait([task], timeout=_SIGNAL_SECONDS)
        return task.result()
    except BaseException:  # Ctrl-C, and what handlers of signals and alarms raise
        task.cancel()
        raise
    finally:
        asyncio.run_coroutine_threadsafe(_drain(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def with_stored_rows(spec: JobSpec, services: Services) -> JobSpec:
    """Return the job with vectors in place of the stored rows that its steering names.

    Raises:
        UnknownCapture: A capture does not exist. A job that continues needs it, too.
    """
    rows = stored_rows(spec.steer)
    if not rows:
        return spec
    client = next(service.client for service in services.all if not service.is_away)
    found = await client._read_rows(rows, {})  # noqa: SLF001 - `generate` reads them for each prompt
    return replace(spec, steer=[operation.with_rows(found) for operation in spec.steer])


async def _drain() -> None:
    """Wait for the other tasks of this loop, which have been cancelled if they are not over."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.gather(*others, return_exceptions=True)


async def _run(job: Job, items: Items | PackedItems, folder: JobFolder, services: Services) -> ExtractSummary:
    began, before = time.monotonic(), folder.done
    sender = PromptSender(job.spec, services, folder.job_id, job.timeout)
    endpoints = [service.client.endpoint for service in services.all]
    kept = {"keep_captures": True} if job.keep_captures else {}
    folder.log("start", time=time.time(), done=before, endpoints=endpoints, **kept, **_facts(services))
    keeps = folder.has_kept_captures()  # also those of an earlier run, which this one may read again
    with show_progress(len(items), before, enabled=job.progress, lines=job.lines) as report:
        runner = Runner(
            job.spec, items, folder, sender, report,
            max_concurrency=services.max_concurrency, on_error=job.on_error, keep_captures=keeps,
        )  # fmt: skip
        try:
            await runner.run()
        except BaseException:
            if job.is_sample:
                for pause in _DISCARD_PAUSES:
                    await asyncio.sleep(pause)
                    await clean_up(services.all, folder.job_id, keep_captures=False)
            raise
        finally:
            totals, seconds = runner.totals, time.monotonic() - began
            with contextlib.suppress(OSError):  # a full disk must not hide why the job stopped
                folder.log("end", time=time.time(), done=folder.done, seconds=round(seconds, 3), **vars(totals))
    folder.write_index(len(items))
    await clean_up(services.all, folder.job_id, keep_captures=keeps)
    return ExtractSummary(done_before=before, seconds=seconds, **vars(totals))


async def _with_pauses(work: Iterator[None]) -> None:
    """Do work that reads many prompts, and let other tasks and Ctrl-C through at its pauses."""
    for _ in work:
        await asyncio.sleep(0)


def _check_prompts(folder: JobFolder, items: Items | PackedItems) -> Iterator[None]:
    """Check that the prompts in the shards are those of the input, with a pause after every few.

    Raises:
        InvalidRequest: A prompt has changed since then.
    """
    for index, noted in enumerate(folder.digests()):
        item = items.item(index)
        if noted != item.digest and noted != _earlier_digest(item):
            raise InvalidRequest(
                f"{item.where} has changed since the job in {folder.path} has read it. Restore the input, or choose "
                "another folder.",
                reason="INVALID_FIELD",
            )
        if index % _PAUSE_PROMPTS == 0:
            yield


def _earlier_digest(item: Item) -> str:
    """Return the digest that an earlier version noted: that of a bad row was of its error."""
    return item.digest if item.error is None else digest([str(item.error)])


def _facts(services: Services) -> dict[str, Any]:
    """Return the versions for people."""
    try:
        version = metadata.version("residuum")
    except metadata.PackageNotFoundError:
        version = "0+source"
    info = services.info
    return {
        "model": {"name": info.model, "num_layers": info.num_layers, "hidden_size": info.hidden_size},
        "versions": {"client": version, "server": info.server_version, "vllm": info.vllm_version},
    }


def names_of(columns: str | Iterable[str]) -> tuple[str, ...]:
    """Return column names, given as a list or as one text with commas."""
    found = columns.split(",") if isinstance(columns, str) else check_texts("keep", columns)
    return tuple(name.strip() for name in found if name.strip())
