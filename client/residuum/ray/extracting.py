"""`extract` on a Ray cluster: actors send the prompts of a dataset, and their rows are a dataset."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ray import get_runtime_context
from ray.data import ActorPoolStrategy, Dataset

from residuum.exceptions import ExtractStopped, InvalidRequest, ResiduumError
from residuum.extraction.inputs.prompts import Items
from residuum.extraction.inputs.tables import TableRows
from residuum.extraction.job import names_of, with_stored_rows
from residuum.extraction.running.prompt_sender import PromptSender
from residuum.extraction.running.runner import Runner, clean_up
from residuum.extraction.running.services import Services
from residuum.extraction.shards import Shard, ShardInfo
from residuum.extraction.spec import JobSpec, OnError, OnLong
from residuum.protocol.captures.stores import check_stores
from residuum.protocol.deadlines import call_seconds
from residuum.ray.extracted_rows import ShardTables
from residuum.ray.places import Places, places_of
from residuum.transport.batches import check_concurrency
from residuum.values.captures.capture import Capture
from residuum.values.steering.operation_list import operation_list
from residuum.values.steering.operations import Operation

if TYPE_CHECKING:
    from residuum.ray.services import RayServices
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token

_Result = TypeVar("_Result")

_BATCH_PROMPTS = 256
_BATCHES_AT_ONCE = 2
"""Batches of one actor. While the last prompts of one run, those of the other keep the services busy."""

_ACTOR_DIGITS = 12
"""The digits of an actor's ID that differ between actors. The others are those of Ray's job."""

_SHARD_BYTES = 32 << 20
"""The approximate size of a block."""


def extract(
    prompts: Dataset,
    endpoints: str | Iterable[str] | RayServices,
    *,
    capture: Capture,
    column: str = "text",
    keep: str | Iterable[str] = (),
    chat: bool = False,
    steer: Sequence[Operation] = (),
    model: str | None = None,
    context_length: int | None = None,
    on_long: OnLong = "fail",
    on_error: OnError = "skip",
    max_concurrency: int | None = None,
    batch_size: int = _BATCH_PROMPTS,
    actors: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    store: str | Iterable[str] | None = None,
    timeout: float | None = None,
    tenant: str | None = None,
    token: Token = None,
    tls: TLS | bool | None = None,
    insecure: bool | None = None,
    **sampling: Any,
) -> Dataset:
    """Return the rows of all prompts as a dataset: `Client.extract` with Ray's nodes, readers and writers.

    Actors send the prompts, each actor to all services. A prompt goes to the service that is working on the fewest
    prompts of its actor. A service that does not answer is left out until it does, and its prompts are sent to another
    one. The captures are deleted from the stores once their rows are in a block. Nothing runs before the dataset is
    used, for example by `write_parquet`.

    The dataset has one row for each token, with these columns: one for each point, such as `blocks.12.hook_resid_post`,
    a list of the captured dtype or of float32; `token_ids`, `positions` and `sequences`; `prompt_sha256`, a digest of
    the prompt and its kept columns; the kept columns; and `error`. A prompt that failed has one row with only its
    digest, its kept columns and `error`: a reason and a message. To leave these out, use
    `rows.filter(expr=col("error").is_null())`, with `col` from `ray.data.expressions`.

    Ray runs the batches of a node that was lost again. A job that was stopped does not continue: use `Client.extract`
    for that, which writes a folder. To pack texts into windows, pack them before, as lists of token IDs.

    Args:
        prompts: The prompts, a row for each. Any reader of `ray.data` makes them.
        endpoints: The inference services, host:port, or those of `serve`. All serve one model. The actors must reach
            them and their stores.
        capture: What to capture.
        column: The column with the prompt: a text, token IDs, or a conversation.
        keep: Further columns, which the rows keep, as a list or separated by commas.
        chat: Treat a text as a user's message.
        steer: As for `Client.generate`.
        model: A LoRA adapter, or the model that you expect.
        context_length: The most tokens of a prompt.
        on_long: What to do with a longer one: "fail", "skip" or "truncate".
        on_error: "skip" turns a prompt that fails into a row with `error`; "stop" raises.
        max_concurrency: The most prompts that each actor sends at once, to all services together. None: twice as many
            as the services run at once, but never more than the actor has.
        batch_size: How many prompts an actor takes at once. It works on two batches at the same time, so it has at most
            2 × batch_size prompts at the services. The rows of about that many may be waiting in the stores.
        actors: How many actors send prompts, or the fewest and the most. Start one for every four services, or more if
            their `max_num_seqs` is larger than 64. All actors together have at most actors × 2 × batch_size prompts at
            the services, or as many as these and the tenant's limit allow (`max_requests`).
        num_cpus: The CPUs that each actor reserves.
        store: As for `Client`; so are the next five arguments. Every actor uses the same credentials. The services of
            `serve` have their own.
        timeout: Seconds that a prompt may take, and that all services may be away; None for 5 minutes.
        tenant: The tenant.
        token: The bearer token.
        tls: TLS settings. Their files must exist on all nodes.
        insecure: Whether a token may be sent in plain text.
        sampling: As for `Client.generate`; by default max_tokens is 0.

    Raises:
        InvalidRequest: An argument is invalid, the dataset is empty, or it has no column `column` or a kept column.

    Example:
        >>> rows = residuum.ray.extract(ray.data.read_json("prompts.jsonl"), "gpu-1:50051", capture=capture, keep="y")
        >>> rows.write_parquet("s3://bucket/rows")
    """
    kept = names_of(keep)
    spec = JobSpec(
        capture=capture, column=column, keep=kept, chat=chat, steer=operation_list(steer), model=model,
        context_length=context_length, on_long=on_long, shard_bytes=_SHARD_BYTES, sampling=sampling,
    )  # fmt: skip
    spec.check()
    if max_concurrency is not None:
        check_concurrency(max_concurrency)
    call_seconds(timeout)
    if on_error not in {"stop", "skip"}:
        raise InvalidRequest(f"on_error={on_error!r} does not exist. Choose 'stop' or 'skip'.")
    schema = prompts.schema()
    if schema is None:
        raise InvalidRequest("The dataset has no prompts. Check the file or the filter.", reason="INVALID_FIELD")
    present = schema.names
    missing = [name for name in (column, *kept) if name not in present]
    if missing:
        raise InvalidRequest(
            f"The dataset has no column {missing[0]!r}. It has {', '.join(map(repr, present))}. Name the column with "
            "the prompt with column=, and those to keep with keep=.",
            reason="INVALID_FIELD",
        )
    settings: dict[str, Any] = {
        "store": check_stores(store), "tenant": tenant, "token": token, "tls": tls, "insecure": insecure,
    }  # fmt: skip
    places = places_of(endpoints, settings, timeout)
    plan = _Plan(spec, places, on_error, max_concurrency, timeout, f"ray-{uuid.uuid4().hex[:12]}")
    size = {"size": actors} if isinstance(actors, int) else {"min_size": actors[0], "max_size": actors[1]}
    return prompts.select_columns([column, *(name for name in kept if name != column)]).map_batches(
        Extractor, fn_constructor_args=(plan,), batch_size=batch_size, batch_format="pyarrow", num_cpus=num_cpus,
        compute=ActorPoolStrategy(
            **size, max_concurrent_calls_per_actor=_BATCHES_AT_ONCE, max_tasks_in_flight_per_actor=2 * _BATCHES_AT_ONCE,
            enable_true_multi_threading=True,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """What every actor needs to know."""

    spec: JobSpec
    places: Places
    on_error: OnError
    max_concurrency: int | None
    timeout: float | None
    name: str
    """The start of the names of all captures."""


class _Begun(NamedTuple):
    """What an actor has once it has reached a service."""

    services: Services
    spec: JobSpec
    tables: ShardTables


class Extractor:
    """An actor: it has an event loop with clients of all services, and runs batches of prompts in it."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        # An actor that Ray starts again keeps its ID, so it finds the captures that it left behind when it died.
        self._name = f"{plan.name}-{get_runtime_context().get_actor_id()[:_ACTOR_DIGITS]}"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="residuum-extract", daemon=True).start()
        self._beginning = threading.Lock()
        self._begun: _Begun | None = None
        # Without a service, the first batch tries again and fails. If this failed, Ray would print pages about an actor
        # that does not start, and start it again.
        with contextlib.suppress(ResiduumError):
            self._started()

    def __call__(self, batch: Any) -> Iterator[Any]:
        """Run a batch of prompts, and yield their rows in blocks, as they are there."""
        begun = self._started()
        output = _Output()
        done = asyncio.run_coroutine_threadsafe(self._run(batch, output, begun), self._loop)
        done.add_done_callback(lambda _: output.close())
        try:
            for shard in output:
                yield begun.tables.of(shard, batch, lambda: self._wait(begun.tables.probe(begun.services)))
            done.result()
        except ExtractStopped as stopped:
            raise _stopped(stopped) from None
        finally:  # also if Ray does not want the rest
            output.abandon()
            done.cancel()

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _started(self) -> _Begun:
        """Return the services and the job, from the first call on at which a service answers.

        Raises:
            ResiduumError: None does, or they cannot run the job.
        """
        with self._beginning:
            if self._begun is None:
                services, spec = self._wait(self._begin())
                self._begun = _Begun(services, spec, ShardTables(spec))
            return self._begun

    async def _begin(self) -> tuple[Services, JobSpec]:
        plan = self._plan
        services = await plan.places.services(plan.max_concurrency, plan.timeout)
        try:
            await services.begin(plan.spec.capture)
            if get_runtime_context().was_current_actor_reconstructed:
                await clean_up(services.all, self._name, keep_captures=False)
            return services, await with_stored_rows(plan.spec, services)
        except BaseException:
            await services.close()
            raise

    async def _run(self, batch: Any, output: _Output, begun: _Begun) -> None:
        services, spec, name = begun.services, begun.spec, f"{self._name}-{uuid.uuid4().hex[:8]}"
        rows = TableRows(batch, "a batch of the dataset")
        runner = Runner(
            spec, Items(rows, column=spec.column, keep=spec.keep, chat=spec.chat), output,
            PromptSender(spec, services, name, self._plan.timeout), lambda _: None,
            max_concurrency=services.max_concurrency, on_error=self._plan.on_error, keep_captures=False,
        )  # fmt: skip
        try:
            await runner.run()
        finally:
            # The store of a service in an actor has ended with it, or is also that of the others.
            there = [item for item in services.all if not (item.is_away and self._plan.places.actors)]
            await clean_up(there, name, keep_captures=False)


class _Output:
    """The shards of a batch. The queue holds one, and the runner waits while two wait for it, so few are in memory."""

    def __init__(self) -> None:
        self.shards: list[ShardInfo] = []
        self.done = 0
        self._queue: queue.Queue[Shard | None] = queue.Queue(maxsize=1)
        self._is_abandoned = threading.Event()
        self._number = 0

    def prepare(self, shard: Shard) -> None:
        """Do nothing: a shard is passed on as it is."""

    def discard(self, shard: Shard) -> None:
        """Do nothing, as `prepare`."""

    def commit(self, shard: Shard, total: int) -> None:  # noqa: ARG002 - as `JobFolder.commit`
        """Pass on a shard. It runs in a thread."""
        while not self._is_abandoned.is_set():
            try:
                self._queue.put(shard, timeout=0.5)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """Note that there are no more shards."""
        threading.Thread(target=self.commit, args=(None, 0), daemon=True).start()

    def abandon(self) -> None:
        """Let the runner end, although nobody takes its shards."""
        self._is_abandoned.set()

    def __iter__(self) -> Iterator[Shard]:
        while (shard := self._queue.get()) is not None:
            yield shard


def _stopped(failure: ExtractStopped) -> ExtractStopped:
    """Return the failure without what it says of a folder."""
    text = str(failure).partition(" The job has stopped")[0]
    failure.args = (f"{text} The job has stopped. Correct the cause, or use on_error='skip'.",)
    return failure
