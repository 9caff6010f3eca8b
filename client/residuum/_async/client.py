"""The asyncio client."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from residuum import exceptions as exc
from residuum._async import io
from residuum._async.generation import AsyncGenerationClient
from residuum.protocol.generation.lens import LensPlan, LogitLens, Transform, Unembedding, UnembedPlan, stream_of
from residuum.protocol.generation.patching import Metric, PatchSweep, SweepPlan
from residuum.protocol.requests import Prompt, RequestLike
from residuum.transport import health
from residuum.v1 import inference_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.capture import Capture
from residuum.values.replies.service_status import Health
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike
from residuum.values.steering.operations import Operation
from residuum.values.tensors.lens import Lens, LensMap

if TYPE_CHECKING:
    from types import TracebackType

    import grpc.aio
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

    from residuum.extraction.inputs.prompts import Source
    from residuum.extraction.results.reader import Extracted
    from residuum.protocol.sampling import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token


class AsyncClient(AsyncGenerationClient):
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
        token: The bearer token for both services, or a `pathlib.Path` of the file that holds it; a text is the token
            itself, never a path. The file is read again when it changes. "" sends no token. Default: RESIDUUM_TOKEN, or
            RESIDUUM_TOKEN_FILE.
        tls: A `residuum.TLS`; True trusts public CAs; False uses plain text. Default: RESIDUUM_TLS_CA,
            RESIDUUM_CLIENT_CERT, RESIDUUM_CLIENT_KEY, RESIDUUM_TLS_SERVER_NAME, or RESIDUUM_TLS=1 for public CAs.
        insecure: Allow sending a token to another machine in plain text. Default: RESIDUUM_INSECURE, or False.
        tenant: The tenant whose captures are read, listed and deleted. It requires an admin's token. Default: the
            token's own tenant; an admin's lists and filters then have the captures of all tenants. Requests always run
            for the token's own tenant, so do not capture with a client of another one: it would not find the captures,
            and could read another one of the same ID.
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
        """Capture the rows of all prompts of a dataset, and write them to files that need no store.

        The job can be stopped or killed at any moment. The same call then continues it: no prompt is computed twice
        whose rows are in a file or complete in the store, and the files are those of a job that was never stopped.
        A prompt is computed once, without a reply, unless you give `max_tokens`.

        If a service does not answer, the job leaves it out until it answers again. If none does, it waits as
        `generate_many` does.

        Args:
            source: The prompts: a file that ends in .jsonl, .txt (one prompt per line), .parquet or .arrow; a folder
                with Parquet files or of `Dataset.save_to_disk`; a split of such a folder, such as data/train for
                data/train-00000-of-00002.parquet and so on; or a list of prompts, or of rows with columns. A folder
                with several splits is refused. Tables need the extra `parquet`.
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
            **sampling: As for `generate`, without logprobs and prompt_logprobs; max_tokens is 0 by default.

        Returns:
            The rows, mapped into memory; its `summary` has the speed and the failures.

        Raises:
            ExtractStopped: A prompt failed, and `on_error` is "stop".
            InvalidRequest: The folder has another job, the input is empty or has changed, or an argument is invalid.
            FileExistsError: The folder has other files, or another process runs the job.
            OSError: The input cannot be read, or a file cannot be written.
            Unreachable: No service answers.
            StoreFull: A store has no room for longer than `timeout`, or 5 minutes.

        Warns:
            OutageWarning: A service does not answer, and is left out; or it refuses every prompt at the moment; or the
                job waits for a store that is full or does not answer. Another one says when it goes on.
            EmptyCaptureWarning: No prompt has any of the selected positions, or all prompts failed.

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
            TypeError: `answer` or `other` is no token ID.

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
            InvalidRequest: The rows are not those of the residual stream or of its parts `attn_out` and `mlp_out`, or
                `lens` is for another width.
            UnknownLayer: `lens` has no map for a layer.
            LimitReached: A map of `lens` does not fit into the server's memory for encoders.
            UnknownCapture: The capture does not exist, or the request captured nothing.

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

    async def _unembed(
        self, request: inference_pb2.UnembedRequest, via: LensMap | None
    ) -> inference_pb2.UnembedResponse:
        try:
            return await self._call(self.endpoint, self._inference.Unembed, request)
        except exc.MissingSAE:
            self._saes.forget(via)  # the server dropped the map, or restarted
            await self._provide_sae(via)
            return await self._call(self.endpoint, self._inference.Unembed, request)

    async def _status(self, endpoint: str) -> str:
        # Without serializers, the request and the answer are bytes.
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channels.get(endpoint).unary_unary(health.CHECK)
        try:
            return health.status_of_answer(await self._call(endpoint, check, health.REQUEST))
        except exc.ResiduumError as failure:
            return health.status_of_failure(failure)
