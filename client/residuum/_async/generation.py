"""The asyncio client's generations: alone, in batches and registered, with their steering."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from residuum import exceptions as exc
from residuum._async import io
from residuum._async.batches import run_as_completed, run_batch
from residuum._async.streams import AsyncStream, make_stream
from residuum._async.tokens import accept
from residuum._async.uploads import AsyncUploadClient
from residuum.protocol import older_servers
from residuum.protocol.captures.reading import Reading, plan_read
from residuum.protocol.deadlines import call_seconds
from residuum.protocol.generation import vector_upload
from residuum.protocol.generation.events import ReplyBuilder
from residuum.protocol.requests import (
    GenerationPlan,
    Prompt,
    RequestLike,
    SteeringPlan,
    check_id,
    plan_generation,
    plan_spec,
    plan_steering,
    stored_rows,
)
from residuum.rpc import tracing
from residuum.transport.batches import BatchPlan, BatchResults, Outage, Steering
from residuum.v1 import inference_pb2
from residuum.values.captures.capture import Capture
from residuum.values.captures.manifest_names import to_datetime
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import Rule
from residuum.values.replies.generation import Registration, Reply
from residuum.values.steering.operations import Operation
from residuum.values.steering.stored_row import StoredRow, read_together
from residuum.values.tensors.vector import Vector

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from residuum.protocol.requests import IfExists
    from residuum.protocol.sampling import Sampling


class AsyncGenerationClient(AsyncUploadClient):
    """The methods that generate; the base class of `residuum.AsyncClient`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._server_reads: frozenset[str] = frozenset()  # the newer fields that the server is known to read
        self._asking = io.Lock()  # held while the client asks for them: requests that start together ask once
        self._turns = io.Turns()

    async def generate(
        self,
        prompt: Prompt,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        registration: Registration | str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply:
        """Generate text and return the whole reply.

        The client first sends the steering vectors that the server lacks. Cancelling the task stops the request.

        Args:
            prompt: A text, a list of token IDs, or a conversation as a list of {"role": ..., "content": ...}. If a
                conversation ends with a message of the assistant, the reply continues that message.
            capture: What to capture; None captures nothing.
            steer: How to steer: one operation, or several in the order in which they apply. If an operation has a
                `StoredRow` in place of a vector, the client first reads the row.
            request_id: Your own ID for the request and its capture. By default the server makes one.
            registration: The result of `register`, which has its own capture, steer, request_id and model.
            model: The LoRA adapter to use, one of `client.info().adapters`; or the model that you expect. The server
                refuses other names. By default the request uses no adapter.
            updatable: Allow `update_steering` to change the steering while the request generates. The request then
                shares no KV cache with other requests, so the model always computes its whole prompt.
            if_exists: What to do if a capture with this request_id exists. "fail" raises CaptureExists. "replace"
                generates again and replaces the capture. "skip" requires a capture of the same request, including the
                labels in `capture`. If it is complete, nothing is generated, and the reply is what the capture holds
                (`reply.skipped`); otherwise it is replaced. A capture whose request is running is never replaced or
                skipped. A capture holds no log-probabilities, so "skip" refuses `logprobs`.
            probes: Probes, whose scores come with each token: `delta.scores` and `reply.scores`.
            score_prompt: Also score every position of the prompt: `reply.prompt_scores`. The model then always computes
                the whole prompt, as it does for a capture.
            rules: Rules, which flag, end or steer the reply by the scores of probes: `delta.events` and `reply.events`.
            without_operator_rules: Do without `client.info().operator_rules`. The server refuses that, unless its
                operator allows it (PermissionDenied).
            timeout: Seconds that the generation may take; None means no limit.
            **sampling: max_tokens (16; 0 only computes the prompt), temperature (0: greedy), n (sequences), logprobs,
                json_schema and others; see `residuum.Sampling`.

        Raises:
            InvalidRequest: The request is invalid; the subclass and the message say why.
            RequestExists: A request with this ID is registered or running.
            CaptureExists: A capture with this ID exists, and `if_exists` does not allow replacing or skipping it.
            UnknownRequest: The registration was used or has expired.
            UnknownCapture: The capture of a `StoredRow` does not exist.
            StoreUnreachable: The request captures, and the inference service cannot reach its store.
            LimitReached: The request uses more vectors than the server allows, or waited too long for room for them.
            RequestAborted: A client called `abort`.
            Unreachable: Nothing answers at the endpoint.
            DeadlineExceeded: The generation took longer than `timeout` and was stopped.

        Example:
            >>> (await client.generate("The capital of France is", max_tokens=1)).text
            ' Paris'
        """
        with tracing.span("client.generate"):
            stream = self.stream(
                prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
                updatable=updatable, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
                without_operator_rules=without_operator_rules, timeout=timeout, **sampling,
            )  # fmt: skip
            async with stream:
                async for _ in stream:
                    pass
            tracing.set_attributes(request_id=stream.reply.request_id)
        return stream.reply

    def stream(
        self,
        prompt: Prompt,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        registration: Registration | str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Return a stream of the tokens of a generation. The arguments are those of `generate`.

        The arguments are checked, and the request starts, when the stream is entered or first read. From then on its ID
        is known and its capture can be followed. Closing or dropping the stream stops the request.

        Example:
            >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
            ...     async for delta in stream:
            ...         print(delta.text, end="")
        """
        make_plan = partial(
            plan_generation,
            prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
            updatable=updatable, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules, sampling=sampling,
        )  # fmt: skip
        return self._stream(make_plan, timeout, {}, io.Stop())

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        capture: Capture | Iterable[Capture | None] | None = None,
        steer: Steering = None,
        request_ids: Iterable[str] | None = None,
        model: str | None = None,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> list[Reply]:
        """Generate for many prompts at once.

        If the inference service or its store does not answer, the batch waits with an OutageWarning: for `timeout`, or
        for 5 minutes without one (for the client's own timeout if it has never reached the service). It starts no other
        prompts until then. A prompt whose reply broke off is generated again only if it has an ID and `if_exists` is
        "skip" or "replace".

        Args:
            prompts: The prompts; see `generate` for their forms.
            capture: What to capture for every prompt; or a list with a Capture or None for each prompt.
            steer: How to steer every prompt: one operation, or several in the order in which they apply. To steer the
                prompts differently, give a list with one item for each prompt: a list of operations, or None.
            request_ids: Your own IDs for the requests and their captures, one for each prompt. By default the server
                makes them.
            model: The LoRA adapter to use, or the model that you expect, as for `generate`.
            if_exists: What to do if a capture with a request's ID exists, as for `generate`. With "skip", you can run
                a job again after it was killed: with the same IDs, it generates only what is not complete. A prompt
                whose capture is None is always generated.
            probes: The probes of every prompt, as for `generate`.
            score_prompt: Also score the positions of the prompts, as for `generate`.
            rules: The rules of every prompt, as for `generate`.
            without_operator_rules: As for `generate`.
            timeout: Seconds that each generation may take.
            max_concurrency: How many generations run at once.
            progress: Show a progress bar, on a terminal or in Jupyter.
            **sampling: As for `generate`.

        Returns:
            The replies in the order of the prompts. `generate_as_completed` yields each reply when it ends. A reply
            means that the model has answered. Its capture may still be open, or end incomplete: the manifest says so.

        Raises:
            BatchFailed: Some prompts failed. It is raised after all other prompts have ended, and holds their replies.
            asyncio.CancelledError: The task was cancelled. Its `__cause__`, a BatchCancelled, holds the replies of the
                prompts that were done.
            InvalidRequest: The items of `capture`, `steer` or `request_ids` are not one for each prompt, two IDs are
                the same, or an argument that all prompts share is invalid, such as a layer of `capture`.
            TypeError: `prompts` is a single prompt, or an argument belongs to a single request, such as request_id.

        Warns:
            OutageWarning: A service does not answer, and the batch waits for it.

        Example:
            >>> replies = await client.generate_many(["One", "Two"], capture=residuum.Capture(), max_tokens=8)
            >>> acts = [await client.activations(reply.request_id) for reply in replies]
            >>> both = await client.generate_many(["One", "One"], steer=[[Add(joy, layer=12)], None])
        """
        plan = BatchPlan.of(
            prompts, capture, steer, sampling,
            request_ids=request_ids, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules,
        )  # fmt: skip
        start = self._starter(plan, model=model, timeout=timeout, **sampling)
        outage = Outage(plan, self._patience, timeout)
        return await run_batch(start, BatchResults(plan), outage, max_concurrency=max_concurrency, progress=progress)

    def generate_as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        capture: Capture | Iterable[Capture | None] | None = None,
        steer: Steering = None,
        request_ids: Iterable[str] | None = None,
        model: str | None = None,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[tuple[int, Reply], None]:
        """Generate for many prompts at once, and yield each reply when its generation ends.

        The arguments are those of `generate_many`. Closing the generator stops the prompts that are running.

        A wait for a reply that is cancelled, as asyncio.wait_for does after its timeout, stops them, too. What comes
        next are the other replies that are there, and a BatchFailed for the prompts without one.

        Yields:
            The index of a prompt and its reply, in the order in which they end.

        Raises:
            BatchFailed: Some prompts failed. It is raised after the last reply, and holds all replies.
            InvalidRequest: The items of `capture`, `steer` or `request_ids` are not one for each prompt, two IDs are
                the same, or an argument that all prompts share is invalid, such as a layer of `capture`.
            TypeError: `prompts` is a single prompt, or an argument belongs to a single request, such as request_id.

        Example:
            >>> async for index, reply in client.generate_as_completed(["One", "Two"], max_tokens=8):
            ...     print(index, reply.text)
        """
        plan = BatchPlan.of(
            prompts, capture, steer, sampling,
            request_ids=request_ids, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules,
        )  # fmt: skip
        start = self._starter(plan, model=model, timeout=timeout, **sampling)
        outage = Outage(plan, self._patience, timeout)
        return run_as_completed(start, BatchResults(plan), outage, max_concurrency=max_concurrency, progress=progress)

    async def register(
        self,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
    ) -> Registration:
        """Check a request before its prompt is known, and send the vectors that it needs.

        One `generate` uses up the registration. An unused registration expires, by default after 10 minutes. You may
        register the same request again with the same ID. With several stores, the registration's ID determines the
        store of the capture. If that store is away at the time of `generate`, the request is refused until it is back;
        a request without a registration would use another store.

        Raises:
            InvalidRequest: The request is invalid; the subclass and the message say why.
            RequestExists: The request ID is registered with another spec, or its request is running.
            LimitReached: Too many registrations are waiting.

        Example:
            >>> registration = await client.register(capture=residuum.Capture(layers="all"))
            >>> reply = await client.generate("Hello", registration=registration)
        """
        plan = plan_spec(
            capture, steer, request_id, model,
            updatable=updatable, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules,
        )  # fmt: skip
        if rows := stored_rows(plan.operations):
            plan = plan.filled(await self._read_rows(rows, {}))
        request = inference_pb2.RegisterRequestRequest(spec=plan.spec)
        await self._check_understood(plan.spec, plan.probes)
        answer = await self._call(self.endpoint, self._inference.RegisterRequest, request, request_id=request_id or "")
        with vector_upload.naming_owner(plan.operations, plan.probes):
            await self._send(vector_upload.only(plan.vectors, answer.missing_digests))
        self._ledger.add(plan.vectors)
        await self._provide_sae(plan.sae)
        seconds = answer.time_to_live.seconds + answer.time_to_live.nanos / 1e9
        return Registration(
            answer.request_id, to_datetime(answer.expire_time), seconds, plan.vectors, plan.probes, plan.sae
        )

    async def update_steering(
        self, request_id: RequestLike, steer: Operation | Iterable[Operation] | None
    ) -> tuple[int, ...]:
        """Change the steering of a request that is generating, from its next token on.

        The request must have been started with `updatable=True`. Vectors that the server lacks are sent first.

        Args:
            request_id: The request, or its stream.
            steer: The new steering, which replaces the current one; None or [] stops steering.

        Returns:
            The first position with the new steering, for each sequence. The manifest's `steering_changes` record it.

        Raises:
            UnknownRequest: No request with this ID is generating.
            NotUpdatable: The request was not started with `updatable=True`.
            InvalidRequest: The steering is invalid; the subclass and the message say why.
            LimitReached: There is no room for more vectors, or the steering was changed too often.

        Example:
            >>> async with client.stream("Once", max_tokens=64, steer=[Add(joy, layer=12)], updatable=True) as stream:
            ...     await anext(stream)
            ...     await client.update_steering(stream, None)
            (5,)
        """
        plan = plan_steering(request_id, steer)
        if rows := stored_rows(plan.operations):
            plan = plan.filled(await self._read_rows(rows, {}))
        await self._check_understood(inference_pb2.RequestSpec(steering=plan.request.steering))
        with vector_upload.naming_owner(plan.operations):
            await self._provide(plan.vectors)
        try:
            answer = await self._update(plan)
        except exc.MissingVectors:
            self._ledger.forget(plan.vectors)  # the server dropped them, or restarted
            await self._provide(plan.vectors)
            answer = await self._update(plan)
        return tuple(answer.first_positions)

    async def abort(self, request_id: RequestLike) -> None:
        """Stop a running request, whose capture then ends aborted, or drop a registration.

        If the request has ended, this changes nothing.

        Raises:
            UnknownRequest: The request does not exist.
        """
        name = check_id(request_id)
        request = inference_pb2.AbortRequest(request_id=name)
        await self._call(self.endpoint, self._inference.Abort, request, request_id=name)

    def _starter(
        self, plan: BatchPlan, *, model: str | None, timeout: float | None, **sampling: Unpack[Sampling]
    ) -> Callable[[int, io.Stop], AsyncStream]:
        """Return a function that starts the generation for the prompt with a given index."""
        timeout = call_seconds(timeout)  # now, because this error ends the batch
        rows: dict[StoredRow, Vector] = {}  # the batch reads each only once

        def start(index: int, stop: io.Stop) -> AsyncStream:
            make_plan = partial(
                plan_generation,
                plan.prompts[index], capture=plan.captures[index], steer=plan.steering[index],
                request_id=plan.request_ids[index], registration=None, model=model, updatable=False,
                if_exists=plan.if_exists[index], probes=plan.probes, score_prompt=plan.score_prompt, rules=plan.rules,
                without_operator_rules=plan.without_operator_rules, sampling=sampling,
            )  # fmt: skip
            return self._stream(make_plan, timeout, rows, stop)

        return start

    def _stream(
        self,
        make_plan: Callable[[], GenerationPlan],
        timeout: float | None,
        rows: dict[StoredRow, Vector],
        stop: io.Stop,
    ) -> AsyncStream:
        async def start() -> tuple[io.Call, ReplyBuilder]:
            seconds = call_seconds(timeout)
            # Without turns, all requests that start at the same time would be planned before the first is sent, and the
            # server would have nothing to do meanwhile.
            async with self._turns:
                plan = make_plan()
            return await self._start(plan, seconds, rows, stop)

        return make_stream(start, self.endpoint, self.update_steering)

    async def _update(self, plan: SteeringPlan) -> inference_pb2.UpdateSteeringResponse:
        name = plan.request.request_id
        return await self._call(self.endpoint, self._inference.UpdateSteering, plan.request, request_id=name)

    async def _read_rows(
        self, rows: Sequence[StoredRow], known: dict[StoredRow, Vector], timeout: float | None = None
    ) -> Mapping[StoredRow, Vector]:
        """Read the stored rows that are not known, and return all of them.

        Raises:
            UnknownCapture: A capture does not exist.
            InvalidRequest: A capture does not have a row, or not of the full width, or is of another model.
        """
        if groups := read_together(row for row in rows if row not in known):
            model = (await self.info()).model
            for group in groups:
                plan = plan_read(
                    group[0].capture, layers=[row.layer for row in group], sites=[group[0].site],
                    sequences=group[0].sequence, positions=[group[0].position], follow=False, allow_partial=True,
                )  # fmt: skip
                reading = Reading(plan)
                async for data in self._read(reading, timeout):
                    reading.add(data)
                acts = reading.activations()
                known.update({row: row.found_in(acts, model) for row in group})
        return known

    async def _start(
        self, plan: GenerationPlan, timeout: float | None, known: dict[StoredRow, Vector], stop: io.Stop
    ) -> tuple[io.Call, ReplyBuilder]:
        """Start a generation and wait until the request is accepted, or until `stop`.

        `known` keeps the stored rows that it reads.
        """
        if rows := stored_rows(plan.operations):
            plan = plan.filled(await self._read_rows(rows, known, timeout))
        await self._check_understood(plan.request.spec, plan.probes, plan.request.sampling)
        with vector_upload.naming_owner(plan.operations, plan.probes):
            await self._provide(plan.vectors)
        await self._provide_sae(plan.sae)
        try:
            call, builder = await self._generate(plan, timeout, stop)
        except (exc.MissingVectors, exc.MissingSAE):
            if not plan.vectors and plan.sae is None:
                raise  # another client made the registration, and this one does not have what it needs
            self._ledger.forget(plan.vectors)  # the server dropped them, or restarted
            self._saes.forget(plan.sae)
            await self._provide(plan.vectors)
            await self._provide_sae(plan.sae)
            call, builder = await self._generate(plan, timeout, stop)
        self._stores.note(builder.started.capture)
        return call, builder

    async def _generate(
        self, plan: GenerationPlan, timeout: float | None, stop: io.Stop
    ) -> tuple[io.Call, ReplyBuilder]:
        call = self._inference.Generate(plan.request, timeout=timeout)
        stop.watch(call)
        try:
            has_answered = self._channels.has_answered(self.endpoint)
            builder = await accept(call, self.endpoint, has_answered=has_answered, probes=plan.probes)
        except exc.ServerFault as failure:
            raise await self._explained(failure, self.endpoint) from None
        self._channels.note_answer(self.endpoint)
        return call, builder

    async def _check_understood(
        self,
        spec: inference_pb2.RequestSpec,
        probes: Sequence[Probe] = (),
        sampling: inference_pb2.SamplingParameters | None = None,
    ) -> None:
        """Check that the server reads all parts of a request; see `older_servers`."""
        needed = older_servers.needed_parts(spec, probes, sampling)
        if not needed <= self._server_reads:
            async with self._asking:
                if not needed <= self._server_reads:
                    self._server_reads = older_servers.known_parts(await self.info())
            older_servers.check_parts(needed, self._server_reads)
