"""The asyncio client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from residuum import exceptions as exc
from residuum._async import io
from residuum._async.batches import run_as_completed, run_batch
from residuum._async.searches import AsyncSearchClient
from residuum._async.streams import AsyncStream, make_stream
from residuum._async.tokens import accept
from residuum.protocol import sae_upload, vector_upload
from residuum.protocol.events import ReplyBuilder
from residuum.protocol.lens import LensPlan, LogitLens, Transform, Unembedding, UnembedPlan, stream_of
from residuum.protocol.patching import Metric, PatchSweep, SweepPlan
from residuum.protocol.reading import Reading, plan_read
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
from residuum.transport import health
from residuum.transport.batches import BatchPlan, BatchResults, Outage, Steering
from residuum.v1 import inference_pb2, steering_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.capture import Capture
from residuum.values.captures.manifest_names import to_datetime
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import Rule
from residuum.values.replies.generation import Registration, Reply
from residuum.values.replies.service_status import Health
from residuum.values.replies.uploads import PutResult, PutSAEResult
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike
from residuum.values.steering.operations import Operation
from residuum.values.steering.stored_row import StoredRow, read_together
from residuum.values.tensors.lens import Lens, LensMap
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector

if TYPE_CHECKING:
    from types import TracebackType

    import grpc.aio
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

    from residuum.extraction.inputs import Source
    from residuum.extraction.reader import Extracted
    from residuum.protocol.requests import IfExists
    from residuum.protocol.sampling import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token


class AsyncClient(AsyncSearchClient):
    """An asyncio client of one inference service and of the stores that keep its captures.

    Channels are opened when they are first used. Use a client within one event loop.
    Close it, or use it in an async with-block.

    Args:
        endpoint: The inference service, host:port. Leave it out and give `store` to read, list, label and delete
            captures without an inference service.
        store: The store or stores. By default the client asks the inference service for their addresses. Give them here
            if those addresses do not work from here, such as behind a tunnel: one store as host:port, several as
            name=host:port with their names in `client.info().stores`. The names tell the client which store to ask
            first for a capture.
        timeout: Seconds after which a call fails with DeadlineExceeded; None means never. Generations and reads have
            a `timeout=` of their own, and no other deadline. A read without one waits this long for a store that this
            client has never reached. For a store that it has reached, or with None here, it waits 5 minutes.
        token: The bearer token for both services, or the path of a file that holds it. The file is read again when it
            changes. "" sends no token. Default: RESIDUUM_TOKEN, or RESIDUUM_TOKEN_FILE.
        tls: A `residuum.TLS`; True trusts public CAs; False uses plain text. Default: RESIDUUM_TLS_CA,
            RESIDUUM_CLIENT_CERT, RESIDUUM_CLIENT_KEY, RESIDUUM_TLS_SERVER_NAME, or RESIDUUM_TLS=1 for public CAs.
        insecure: Allow sending a token to another machine in plain text. Default: RESIDUUM_INSECURE, or False.
        tenant: The tenant whose captures are read, listed and deleted. It requires an admin's token. Default: the
            token's own tenant; an admin's lists then show all tenants.
        shared_memory: Whether rows of a store on the same machine may pass through shared memory, which is faster. The
            client detects whether that works; see `shared_memory_problems`. RESIDUUM_SHARED_MEMORY=off switches it off
            for all clients.

    Raises:
        BadCredentials: A token or TLS file cannot be read, or the token would be sent to another machine in plain text.

    Example:
        >>> async with residuum.AsyncClient("localhost:50051") as client:
        ...     reply = await client.generate("The capital of France is", capture=residuum.Capture(layers=[12]))
        ...     acts = await client.activations(reply.request_id)
        >>> acts[12].shape
        (20, 576)
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        store: str | Iterable[str] | None = None,
        timeout: float | None = 30.0,
        token: Token = None,
        tls: TLS | bool | None = None,
        insecure: bool | None = None,
        tenant: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            endpoint, store=store, timeout=timeout, token=token, tls=tls, insecure=insecure, tenant=tenant,
            shared_memory=shared_memory,
        )  # fmt: skip
        self._ledger = vector_upload.VectorLedger()
        self._saes = sae_upload.SAELedger()
        self._server_reads: frozenset[str] = frozenset()  # the newer fields that the server is known to read

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

        The request starts when the stream is entered or first read. From then on its ID is known and its capture can
        be followed. Closing or dropping the stream stops the request.

        Example:
            >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
            ...     async for delta in stream:
            ...         print(delta.text, end="")
        """
        plan = plan_generation(
            prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
            updatable=updatable, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules, sampling=sampling,
        )  # fmt: skip
        return self._stream(plan, timeout, {})

    def _stream(self, plan: GenerationPlan, timeout: float | None, rows: dict[StoredRow, Vector]) -> AsyncStream:
        async def start() -> tuple[io.Call, ReplyBuilder]:
            return await self._start(plan, timeout, rows)

        return make_stream(start, self.endpoint, self.update_steering)

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
            BatchCancelled: The task was cancelled. It holds the replies of the prompts that were done.
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
    ) -> AsyncIterator[tuple[int, Reply]]:
        """Generate for many prompts at once, and yield each reply when its generation ends.

        The arguments are those of `generate_many`. Closing the generator stops the prompts that are running.

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
        await self._check_understood(plan.spec.steering, plan.probes)
        answer = await self._call(self.endpoint, self._inference.RegisterRequest, request, request_id=request_id or "")
        await self._send(vector_upload.only(plan.vectors, answer.missing_digests))
        self._ledger.add(plan.vectors)
        await self._provide_sae(plan.sae)
        seconds = answer.time_to_live.seconds + answer.time_to_live.nanos / 1e9
        return Registration(
            answer.request_id, to_datetime(answer.expire_time), seconds, plan.vectors, plan.probes, plan.sae
        )

    async def extract(
        self,
        source: Source,
        folder: str | os.PathLike[str],
        *,
        capture: Capture,
        column: str = "text",
        keep: str | Iterable[str] = (),
        chat: bool = False,
        steer: Operation | Iterable[Operation] | None = None,
        model: str | None = None,
        limit: int | None = None,
        shuffle: int | None = None,
        context_length: int | None = None,
        on_long: Literal["fail", "skip", "truncate"] = "fail",
        on_error: Literal["stop", "skip"] = "stop",
        pack: bool = False,
        separator: int | Literal["bos", "eos"] | None = "bos",
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: Literal["stored", "float32"] = "stored",
        shard_bytes: int = 256 << 20,
        keep_captures: bool = False,
        endpoints: Iterable[str] = (),
        timeout: float | None = None,
        max_concurrency: int | None = None,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Extracted:
        """Capture the rows of all prompts of a data set, and write them to files that need no store.

        The job can be stopped or killed at any moment. The same call then continues it: no prompt is computed twice
        whose rows are in a file or complete in the store, and the files are those of a job that was never stopped.
        A prompt is computed once, without a reply, unless you give `max_tokens`.

        If a service does not answer, the job leaves it out until it answers again. If none does, it waits as
        `generate_many` does.

        Args:
            source: The prompts: a file that ends in .jsonl, .txt (one prompt per line), .parquet or .arrow; a folder
                with Parquet files or of `Dataset.save_to_disk`; or a list of prompts, or of rows with columns. Tables
                need the extra `parquet`.
            folder: The folder to write. It must not exist, be empty, or have the same job.
            capture: What to capture of every prompt.
            column: The column with the prompt: a text, a list of token IDs, or a conversation as a list of messages.
            keep: The columns to keep, as a list or separated by commas. `rows.labels` has their values. They are not
                labels of the captures, so filters on labels do not see them; `capture.labels` sets these.
            chat: Whether a text is a user's message in a chat.
            steer: How to steer every prompt.
            model: The LoRA adapter to use, or the model that you expect, as for `generate`.
            limit: The most prompts; None means all.
            shuffle: The seed of a random order of the prompts; None keeps the order of the input. With `limit`, the job
                is a random sample.
            context_length: The most tokens of a prompt; None leaves this to the model.
            on_long: What to do with a prompt that is longer: "fail" treats it as an error; "skip" leaves it out;
                "truncate" uses its first tokens. A conversation cannot be truncated.
            on_error: What to do if a row of the input is broken, or its prompt fails: "stop" the job, or "skip" the
                prompt and record the reason. Failures that would concern all prompts always stop the job. With `pack`,
                broken documents are left out and recorded as well.
            pack: Join the prompts and cut them into windows of exactly `context_length` tokens, as training of sparse
                autoencoders wants it. `limit` then counts windows, and the tokens after the last full one are left out.
                `rows.documents` names the row of the input for each row.
            separator: With `pack`: the token between two documents and at the start of each window, unless it is there
                already: "bos" or "eos" of the tokenizer, a token ID, or None for none. A tokenizer without "bos" has
                "eos" in its place.
            tokenizer: With `pack`: the folder of the served model, with its tokenizer.json. It needs the extra `pack`.
                Leave it out if the prompts are lists of token IDs. The job continues only with the same tokenizer.json.
            dtype: "stored" writes rows in the dtype in which they were captured, and decoded ones as float32. "float32"
                writes all as float32.
            shard_bytes: The approximate size of a file of rows. The client holds up to three of them in memory. The
                stores hold the captures of these, and of the prompts that run or wait to be read: up to two files
                more, or `max_concurrency` captures if these are larger.
            keep_captures: Keep the captures in the stores. By default they are deleted when their rows are on the disk.
            endpoints: Further inference services of the same model. Each prompt goes to the one that is
                working on the fewest.
            timeout: Seconds that each prompt may take.
            max_concurrency: The most prompts that are sent at once, to all services together. None: twice as many as
                the services run at once, so that they never wait for prompts. A service that refuses a prompt, because
                it or your tenant has too many requests, gets fewer.
            progress: Show a progress bar, on a terminal or in Jupyter.
            **sampling: As for `generate`; max_tokens is 0 by default.

        Returns:
            The rows, mapped into memory; its `summary` has the speed and the failures.

        Raises:
            ExtractStopped: A prompt failed, and `on_error` is "stop".
            InvalidRequest: The folder has another job, the input is empty or has changed, or an argument is invalid.
            FileExistsError: The folder has other files, or another process runs the job.
            OSError: The input cannot be read, or a file cannot be written.
            Unreachable: No service answers.

        Warns:
            OutageWarning: A service does not answer, and is left out; or it refuses every prompt at the moment.

        Example:
            >>> what = residuum.Capture(layers=[12], positions="last_prompt")
            >>> rows = await client.extract("train.jsonl", "train-rows", capture=what, keep="label")
            >>> rows.layer(12).shape, rows.labels("label")[:3]
            ((2000, 576), [1, 0, 0])
        """
        spec: dict[str, Any] = {
            "capture": capture, "column": column, "keep": keep, "chat": chat, "steer": steer, "model": model,
            "limit": limit, "shuffle": shuffle, "context_length": context_length, "on_long": on_long, "dtype": dtype,
            "shard_bytes": shard_bytes, "pack": pack, "separator": separator, "tokenizer": tokenizer,
            "sampling": sampling,
        }  # fmt: skip
        return await io.extract(
            self, source, folder, spec, endpoints, on_error=on_error, keep_captures=keep_captures, timeout=timeout,
            max_concurrency=max_concurrency, progress=progress,
        )  # fmt: skip

    async def patch_sweep(
        self,
        clean: Prompt,
        corrupted: Prompt,
        *,
        layers: LayersLike = "all",
        positions: PositionsLike = "prompt",
        site: str = "resid_post",
        metric: Metric = "logit_difference",
        answer: int | None = None,
        other: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
    ) -> PatchSweep:
        """Find out which rows of one prompt make the model answer as it does for another one (activation patching).

        The clean prompt's rows are captured. Then each of them, one at a time, replaces the row of the corrupted prompt
        at the same layer and position, and the answer is scored again. All these requests run as one batch. The two
        captures that this makes are deleted.

        Args:
            clean: The prompt that gives the rows; see `generate` for its forms.
            corrupted: The prompt whose rows are replaced. It must have as many tokens.
            layers: The layers to patch.
            positions: The positions to patch.
            site: The site to patch: one of `client.info().steering_sites`.
            metric: What is scored: "logit_difference", the logit of `answer` minus that of `other`; or "logprob", the
                log-probability of `answer`.
            answer: The token ID of the clean prompt's answer. By default the first token of the model's own reply.
            other: The token ID of the corrupted prompt's answer. By default the first token of the model's own reply.
            model: The LoRA adapter to use, or the model that you expect, as for `generate`.
            timeout: Seconds that each generation may take.
            max_concurrency: How many generations run at once.
            progress: Show a progress bar, on a terminal or in Jupyter.

        Raises:
            InvalidRequest: The prompts differ in length, `answer` and `other` are the same token, or an argument is
                invalid.
            UnknownSite: The server does not capture or steer at the site.
            BatchFailed: Some requests failed.

        Example:
            >>> sweep = await client.patch_sweep("The capital of France is", "The capital of Italy is")
            >>> sweep.recovered.shape  # [layers, positions]; 1 where a row brings back the whole answer
            (30, 5)
        """
        capture = Capture(layers=layers, sites=[site], positions=positions)
        made = [await self.generate(clean, capture=capture, model=model, timeout=timeout, max_tokens=1)]
        try:
            acts = await self.activations(made[0], timeout=timeout)
            capture = Capture(layers=[acts.layers[0]], sites=[site], positions=positions)
            made.append(await self.generate(corrupted, capture=capture, model=model, timeout=timeout, max_tokens=1))
            others = await self.activations(made[1], timeout=timeout)
        finally:
            await self.delete(made)
        plan = SweepPlan.of(made[0], made[1], acts, others, metric=metric, answer=answer, other=other)
        info = await self.info()
        if len(plan.vectors) <= info.limits["max_vectors"]:
            await self.put_vectors(plan.vectors)  # in one call; otherwise each request sends its own
        prompts, steer = zip(*plan.requests(), strict=True)
        scored = await self.generate_many(
            prompts, steer=steer, model=model, timeout=timeout, max_concurrency=max_concurrency, progress=progress,
            max_tokens=0, prompt_logprobs=0,
        )  # fmt: skip
        return plan.result(scored)

    async def logit_lens(
        self,
        capture: RequestLike | Activations,
        *,
        top_k: int = 10,
        lens: Lens | None = None,
        transform: Transform | None = None,
        timeout: float | None = None,
    ) -> LogitLens:
        """Find out what each layer of a model predicts: captured rows go through its final norm and unembedding.

        The server applies both, as it does to the last layer's rows when it generates. So the last layer predicts what
        the model predicted.

        Args:
            capture: The capture whose rows to use: a request, its reply or stream. Its rows of resid_post are used, if
                it has them. Or activations, if you have them or want only some: `acts.select(site="resid_mid")`.
            top_k: How many of the most likely tokens to return for each row.
            lens: Changes the rows of each layer on the server, before the final norm: a tuned lens or a Jacobian lens.
                Its maps are sent first, each once. The server must have been started with `--sae-mib`.
            transform: Changes rows here, before they are sent: it takes a layer and its rows, float32 [positions,
                hidden_size], and returns as many.
            timeout: Seconds that reading the capture may take.

        Raises:
            InvalidRequest: The rows are not those of the residual stream, or `lens` is for another width.
            UnknownLayer: `lens` has no map for a layer.
            LimitReached: A map of `lens` does not fit into the server's memory for encoders.
            UnknownCapture: The capture does not exist.
            NoCapture: The request captured nothing.

        Example:
            >>> reply = await client.generate("The capital of France is", max_tokens=1, capture=residuum.Capture())
            >>> lens = await client.logit_lens(reply)
            >>> lens.top_texts[-1][-1], lens.ranks[-1, -1]
            (' Paris', 1)
        """
        if not isinstance(capture, Activations):
            capture = stream_of(await self.activations(capture, timeout=timeout))
        plan = LensPlan(capture, transform, lens)
        found = [await self.unembed(rows, top_k=top_k, tokens=tokens, via=item) for rows, tokens, item in plan.parts]
        return plan.result(found)

    async def unembed(
        self,
        rows: npt.ArrayLike,
        *,
        top_k: int = 10,
        tokens: npt.ArrayLike | None = None,
        via: LensMap | None = None,
    ) -> Unembedding:
        """Apply the model's final norm and unembedding to rows, and return the tokens that they predict.

        The rows may come from captures, or be anything else of the stream's width, such as a steering vector or the
        direction of a feature: then the tokens are those that it promotes.

        Args:
            rows: [..., hidden_size]. They are sent as float32, in as many calls as they need.
            top_k: How many of the most likely tokens to return for each row.
            tokens: A token ID for each row, [...], whose log-probability and rank to return; -1 is none.
            via: A map of a lens, such as `lens[12]`, which the server applies to the rows first. It is sent if the
                server lacks it.

        Raises:
            InvalidRequest: The rows have another width than the stream or the map, or are not finite; a token is not in
                the vocabulary; or the shapes of rows and tokens differ.
            LimitReached: The map does not fit into the server's memory for encoders.

        Example:
            >>> found = await client.unembed(joy.values, top_k=3)
            >>> [found.text(token) for token in found.top_ids]
            [' joy', ' happy', ' celebrate']
        """
        plan = UnembedPlan(rows, top_k, tokens, via)
        await self._provide_sae(via)
        return plan.result([await self._unembed(request, via) for request in plan.requests()])

    async def put_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> PutResult:
        """Send vectors, or those of Directions, that the server lacks. Calls that steer also do this.

        Raises:
            BadVector: The server refused a vector; it accepted the others.

        Example:
            >>> (await client.put_vectors([joy])).sent, (await client.put_vectors([joy])).sent
            (1, 0)
        """
        given = vector_upload.vector_list(vectors)
        return vector_upload.put_result(given, await self._provide(given))

    async def put_sae(self, sae: SAE) -> PutSAEResult:
        """Send the encoder of a sparse autoencoder, if the server lacks it. Requests that capture features do this.

        The server keeps it in device memory until it needs the room for another one.

        Raises:
            LimitReached: It does not fit into the server's memory for encoders; the message says what is left.
            BadSAE: Rows of the model have another width.
            InvalidRequest: The server takes no sparse autoencoders.

        Example:
            >>> (await client.put_sae(residuum.sae.load("sae/"))).free_bytes
            134217728
        """
        sae = sae_upload.check_sae(sae)
        return sae_upload.put_result(sae, await self._put_encoder(sae))

    async def find_missing_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
        """Return the vectors that the server lacks. Asking for the others prolongs the time that it keeps them."""
        given = vector_upload.vector_list(vectors)
        missing: set[bytes] = set()
        for request in vector_upload.find_requests(given):
            answer = await self._call(self.endpoint, self._inference.FindMissingVectors, request)
            missing.update(answer.missing_digests)
        return vector_upload.only(given, missing)

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
        await self._check_understood(plan.request.steering)
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

    async def health(self) -> Health:
        """Return whether each service is ready. This raises no error for a service that is not.

        Example:
            >>> (await client.health()).ok
            True
        """
        try:
            stores: Sequence[str] = await self.store_endpoints()
        except exc.ResiduumError:
            stores = ()  # the inference service's own status shows the problem
        inference = await self._status(self.endpoint) if self.endpoint else ""
        return Health(inference, {endpoint: await self._status(endpoint) for endpoint in stores})

    async def close(self) -> None:
        """Close the channels and stop running streams. The client cannot be used afterwards."""
        for channel in self._channels.drain():
            await channel.close()
        self._memories.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.endpoint!r})"

    def _starter(
        self, plan: BatchPlan, *, model: str | None, timeout: float | None, **sampling: Unpack[Sampling]
    ) -> Callable[[int], AsyncStream]:
        """Return a function that starts the generation for the prompt with a given index."""
        rows: dict[StoredRow, Vector] = {}  # the batch reads each only once

        def start(index: int) -> AsyncStream:
            generation = plan_generation(
                plan.prompts[index], capture=plan.captures[index], steer=plan.steering[index],
                request_id=plan.request_ids[index], registration=None, model=model, updatable=False,
                if_exists=plan.if_exists[index], probes=plan.probes, score_prompt=plan.score_prompt, rules=plan.rules,
                without_operator_rules=plan.without_operator_rules, sampling=sampling,
            )  # fmt: skip
            return self._stream(generation, timeout, rows)

        return start

    async def _update(self, plan: SteeringPlan) -> inference_pb2.UpdateSteeringResponse:
        name = plan.request.request_id
        return await self._call(self.endpoint, self._inference.UpdateSteering, plan.request, request_id=name)

    async def _unembed(
        self, request: inference_pb2.UnembedRequest, via: LensMap | None
    ) -> inference_pb2.UnembedResponse:
        try:
            return await self._call(self.endpoint, self._inference.Unembed, request)
        except exc.MissingSAE:
            self._saes.forget(via)  # the server dropped the map, or restarted
            await self._provide_sae(via)
            return await self._call(self.endpoint, self._inference.Unembed, request)

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
                reading = Reading(replace(plan, warns_if_empty=False))
                async for data in self._read(reading, timeout):
                    reading.add(data)
                acts = reading.activations()
                known.update({row: row.found_in(acts, model) for row in group})
        return known

    async def _start(
        self, plan: GenerationPlan, timeout: float | None, known: dict[StoredRow, Vector]
    ) -> tuple[io.Call, ReplyBuilder]:
        """Start a generation and wait until the request is accepted. `known` keeps the stored rows that it reads."""
        if rows := stored_rows(plan.operations):
            plan = plan.filled(await self._read_rows(rows, known, timeout))
        await self._check_understood(plan.request.spec.steering, plan.probes)
        await self._provide(plan.vectors)
        await self._provide_sae(plan.sae)
        try:
            call, builder = await self._generate(plan, timeout)
        except (exc.MissingVectors, exc.MissingSAE):
            if not plan.vectors and plan.sae is None:
                raise  # another client made the registration, and this one does not have what it needs
            self._ledger.forget(plan.vectors)  # the server dropped them, or restarted
            self._saes.forget(plan.sae)
            await self._provide(plan.vectors)
            await self._provide_sae(plan.sae)
            call, builder = await self._generate(plan, timeout)
        self._stores.note(builder.started.capture)
        return call, builder

    async def _generate(self, plan: GenerationPlan, timeout: float | None) -> tuple[io.Call, ReplyBuilder]:
        call = self._inference.Generate(plan.request, timeout=timeout)
        try:
            has_answered = self._channels.has_answered(self.endpoint)
            builder = await accept(call, self.endpoint, has_answered=has_answered, probes=plan.probes)
        except exc.ServerFault as failure:
            raise await self._explained(failure, self.endpoint) from None
        self._channels.note_answer(self.endpoint)
        return call, builder

    async def _check_understood(self, steering: steering_pb2.SteeringSpec, probes: Sequence[Probe] = ()) -> None:
        """Check that the server reads the probes, and the site and the gate of each operation.

        An older server ignores them, in silence.

        Raises:
            UnknownSite: The server does not read the site.
            UnknownOperation: The server does not read the gate.
            InvalidRequest: The server does not read the probes.
        """
        has_site = any(operation.site for operation in steering.operations)
        has_gate = any(operation.HasField("gate") for operation in steering.operations)
        pools = any(probe.attention for probe in probes)
        uses = {"sites": has_site, "gates": has_gate, "probes": probes, "attention": pools}
        needed = {name for name, is_used in uses.items() if is_used}
        if needed <= self._server_reads:
            return
        info = await self.info()
        lists: dict[str, object] = {
            "sites": info.steering_sites,
            "gates": info.gate_measures,
            "probes": info.probe_sites,
            "attention": info.limits["max_probe_heads"],
        }
        self._server_reads = frozenset(name for name, known in lists.items() if known)
        if has_site and "sites" not in self._server_reads:
            raise exc.UnknownSite(
                "This server is older than the client, and steers only at resid_post. Update it, or leave out site=.",
                reason="UNKNOWN_SITE",
            )
        if has_gate and "gates" not in self._server_reads:
            raise exc.UnknownOperation(
                "This server is older than the client, and would ignore the gate. Update it, or leave out gate=.",
                reason="UNKNOWN_OPERATION",
            )
        if probes and "probes" not in self._server_reads:
            raise exc.InvalidRequest(
                "This server is older than the client, and would ignore the probes. Update it, or leave out probes=.",
                reason="INVALID_FIELD",
                metadata={"field": "probes"},
            )
        if pools and "attention" not in self._server_reads:
            raise exc.InvalidRequest(
                "This server is older than the client, and would ignore the attention of a probe. Update it, or leave "
                "out the attention probes.",
                reason="INVALID_FIELD",
                metadata={"field": "probes"},
            )

    async def _provide(self, vectors: Iterable[Vector]) -> list[Vector]:
        """Send the vectors that the server lacks, and return them."""
        unknown = self._ledger.unknown(vectors)
        if not unknown:
            return []
        missing = await self.find_missing_vectors(unknown)
        await self._send(missing)
        self._ledger.add(unknown)
        return missing

    async def _provide_sae(self, sae: sae_upload.Encoder | None) -> None:
        """Send an encoder if the server may lack it."""
        if sae is not None and not self._saes.knows(sae):
            await self._put_encoder(sae)

    async def _put_encoder(self, sae: sae_upload.Encoder) -> inference_pb2.PutSAEResponse:
        put = self._inference.PutSAE
        try:
            try:
                answer = await self._call(self.endpoint, put, sae_upload.find_requests(sae))
            except exc.MissingSAE:
                requests, extra = sae_upload.put_requests(sae), sae_upload.extra_seconds(sae)
                answer = await self._call(self.endpoint, put, requests, extra=extra)
        except exc.ResiduumError as failure:
            raise sae_upload.refusal(failure, sae) from None
        self._saes.add(sae)
        return answer

    async def _send(self, vectors: Sequence[Vector]) -> None:
        for part in vector_upload.put_calls(vectors):
            answer = await self._call(self.endpoint, self._inference.PutVectors, vector_upload.put_requests(part))
            vector_upload.check_results(part, answer)

    async def _status(self, endpoint: str) -> str:
        # Without serializers, the request and the answer are bytes.
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channels.get(endpoint).unary_unary(health.CHECK)
        try:
            return health.status_of_answer(await self._call(endpoint, check, health.REQUEST))
        except exc.ResiduumError as failure:
            return health.status_of_failure(failure)
