"""The front end inside vLLM's API server: what the inference service's own process does, for `vllm serve`.

A request that asks for nothing goes through untouched. One that does is checked before vLLM's endpoint begins its
answer, so that a bad one is a 400; its capture is opened before vLLM hears of it, and sealed however it ends.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.captures.keeper import NoAnswerError
from inference_svc.engine.engine import Engine, model_runner
from inference_svc.engine.facts import ModelFacts
from inference_svc.engine.ranks import check_ranks
from inference_svc.engine.worker_settings import site_numbers
from inference_svc.requests.capture_specs import CaptureDefaults
from inference_svc.requests.checks import invalid
from inference_svc.requests.plans import count_spare_positions, make_plan
from inference_svc.requests.registry import RequestRegistry
from inference_svc.requests.specs import check_capture_size, directions_of, resolve_spec
from inference_svc.resources.projections import Projections, projection_of
from inference_svc.resources.vector_activator import VectorActivator, VectorHold
from inference_svc.resources.vector_cache import VectorCache, cache_capacity, digest_in
from inference_svc.selftest import run_self_test
from inference_svc.session.capture_ends import aborted_seal, blame, describe_capture
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.reductions import REDUCTIONS
from inference_svc.vllm_serve.delivery import Delivery
from inference_svc.vllm_serve.outputs import Sequences, in_turn
from inference_svc.vllm_serve.refusals import told_to_http
from inference_svc.vllm_serve.xargs import Asked, asks, read_asked, without_ours
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2
from residuum.wire.encodings import ENCODINGS
from residuum.wire.ids import is_valid_id, make_id
from residuum.wire.limits import MAX_SEQUENCES
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence

    from inference_svc.engine.tap_settings import TapSettings
    from inference_svc.requests.registry import Running
    from inference_svc.requests.specs import ResolvedSpec

    Generate = Callable[..., AsyncGenerator[Any]]

_log = get_logger(__name__)


class _Untapped:
    """An AsyncLLM whose `generate` is vLLM's own: for the self-test, which brings its plans."""

    def __init__(self, llm: Any, generate: Generate) -> None:
        self._llm = llm
        self.generate = generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


@dataclass(frozen=True)
class _Admitted:
    """A request that was found good."""

    spec: ResolvedSpec
    """With the id of its capture."""
    asked: Asked
    prompt: Any
    """As vLLM takes it."""
    token_ids: list[int]
    sampling: Any
    """vLLM's parameters, without what is ours."""
    parameters: inference_pb2.SamplingParameters
    """What plans and checks need of them."""
    request_id: str
    """What vLLM calls it."""


class FrontEnd:
    """Captures and steers the requests of one API server."""

    def __init__(self, settings: TapSettings, llm: Any, generate: Generate, index: int, count: int) -> None:
        """Get ready for requests; the rest is done on the event loop, at once if it runs.

        Args:
            settings: The settings.
            llm: The AsyncLLM.
            generate: Its own `generate`.
            index: Which API server this is.
            count: How many there are.
        """
        self._settings = settings
        self._generate = generate
        self._index, self._count = index, count
        self._facts = facts_of(llm.vllm_config, settings)
        self._engine = Engine(_Untapped(llm, generate), None, self._facts)
        self._registry = RequestRegistry(time_to_live=0.0, max_registrations=0)
        kept = cache_capacity(settings.max_vectors, settings.max_vector_mib, self._facts.hidden_size)
        self._cache = VectorCache(kept, self._facts.hidden_size, self._registry.is_leased)
        self._activator = VectorActivator(
            self._cache, settings.max_active_vectors, self._engine.load_vectors, settings.vector_wait_seconds
        )
        self._projections = Projections(self._engine.keep_signs, self._facts.hidden_size, settings.vector_wait_seconds)
        self._delivery = Delivery(settings) if settings.store else None
        self._folders: set[Path] = set()
        self._starting: asyncio.Task[None] | None = None
        with suppress(RuntimeError):  # no loop runs yet: then the first request that needs it does this
            self._starting = asyncio.get_running_loop().create_task(self._start())

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[Any]:
        """Generate as vLLM does, and capture and steer what is asked for.

        Raises:
            VLLMValidationError: What is asked for cannot be. It is raised here, before the endpoint begins to answer.
            GracefulHTTPError: Nothing can be captured or steered; its text says why.
        """
        extra_args = sampling_params.extra_args
        if not asks(extra_args):
            return self._generate(prompt, sampling_params, request_id, **options)
        sampling = sampling_params.clone()
        sampling.extra_args = without_ours(extra_args)
        with told_to_http():
            asked = read_asked(extra_args)
            admitted = self._admit(asked, prompt, sampling, request_id) if asked else None
        if admitted is None:
            return self._generate(prompt, sampling, request_id, **options)
        return self._run(admitted, options)

    def hand_over(self) -> None:
        """Before the engine stops: tell the stores of all ends."""
        if self._delivery is not None:
            self._delivery.close_stores()

    def close(self) -> None:
        """After the engine has stopped: let the shippers deliver what they have, and clean up."""
        if self._delivery is not None:
            self._delivery.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ at the start

    async def _start(self) -> None:
        with _told_at_start("not every layer is known to be tapped"):
            ranks = await self._engine.llm.collective_rpc("residuum_describe")
            check_ranks(ranks, self._facts.num_layers)
        if self._index == 0:  # one API server does for all what is done once
            await self._start_once([rank["control_path"] for rank in ranks if rank["control_path"]])
        _log.info(
            "residuum is ready",
            model=self._facts.name,
            sites=[capture_pb2.Site.Name(site) for site in self._facts.sites],
            stores=[str(store) for store in self._settings.stores],
            ring_bytes=sum(rank["ring_bytes"] for rank in ranks),
        )

    async def _start_once(self, controls: Sequence[str]) -> None:
        self._folders = {Path(control).parent for control in controls}
        if self._delivery is not None:
            with _told_at_start("its shippers cannot be started"):
                await self._delivery.ship(controls)
        with _told_at_start("its self-test failed"):
            await run_self_test(self._engine)

    async def _started(self) -> None:
        """Wait until captures can be made.

        Raises:
            Failure: They never can.
        """
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    def _check_start(self) -> None:
        """Refuse at once, and not only in the answer, what is known to be never possible.

        Raises:
            Failure: Nothing can be captured or steered.
        """
        if self._starting is not None and self._starting.done() and not self._starting.cancelled():
            self._starting.result()

    # ---------------------------------------------------------------------------------------- the checks of a request

    def _admit(self, asked: Asked, prompt: Any, sampling: Any, request_id: str) -> _Admitted:
        """Check a request in full.

        Raises:
            Failure: It cannot be run.
        """
        self._check_start()
        spec = resolve_spec(asked.spec, self._facts)
        if spec.capture is None and spec.steering is None:
            raise invalid("vllm_xargs.residuum", "The spec has neither a capture nor steering; leave it out.")
        if spec.steering is not None and spec.steering.updatable:
            raise invalid("steering.updatable", "The OpenAI API cannot change the steering of a running request.")
        if spec.capture is not None and self._delivery is None:
            raise invalid("capture", "This server has no store; its operator sets RESIDUUM_STORE.")
        token_ids = _token_ids(prompt)
        parameters = self._parameters(sampling, len(token_ids))
        check_capture_size(spec.capture, len(token_ids), parameters)
        self._keep(asked)
        self._check_vectors(spec)
        spec = replace(spec, request_id=_capture_id(spec, request_id))
        return _Admitted(spec, asked, prompt, token_ids, sampling, parameters, request_id)

    def _parameters(self, sampling: Any, prompt_tokens: int) -> inference_pb2.SamplingParameters:
        if not 1 <= sampling.n <= MAX_SEQUENCES:
            raise invalid("n", f"n must be from 1 to {MAX_SEQUENCES} for a request that is captured or steered.")
        room = max(self._facts.max_model_len - prompt_tokens, 1)
        return inference_pb2.SamplingParameters(
            max_tokens=min(sampling.max_tokens or room, room), num_sequences=sampling.n, stop=sampling.stop or ()
        )

    def _keep(self, asked: Asked) -> None:
        for vector in asked.vectors:
            self._cache.put(vector)

    def _check_vectors(self, spec: ResolvedSpec) -> None:
        if self._count > 1 and (spec.digests or projection_of(spec.capture)):
            raise invalid(
                "vllm_xargs.residuum",
                "Vectors and random projections need a server with one API server process (--api-server-count 1): "
                "several would overwrite each other's in the workers.",
            )
        self._cache.check_number(len(spec.digests))
        missing = self._cache.missing(spec.digests)
        if missing:
            digests = ",".join(digest_in(name).hex() for name in missing[:64])
            raise Failure(
                Reason.ERROR_REASON_MISSING_VECTORS,
                f"{len(missing)} of the request's vectors are not on the server; send them in "
                "vllm_xargs.residuum_vectors.",
                digests=digests,
            )
        for digest in directions_of(spec.steering) if spec.steering else ():
            self._cache.check_direction(digest)

    # ---------------------------------------------------------------------------------------- the life of a request

    async def _run(self, admitted: _Admitted, options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        with told_to_http():
            await self._started()
            running = self._registry.start_inline(admitted.spec)
            began = False
            try:
                self._keep(admitted.asked)  # they may have had to go since they were checked
                async with VectorHold(self._activator) as hold, AsyncExitStack() as signs:
                    await hold.add(admitted.spec.digests)
                    if projection := projection_of(admitted.spec.capture):
                        await signs.enter_async_context(self._projections.held(projection))
                    sequences = Sequences(admitted.sampling.n, admitted.sampling.output_kind)
                    await self._open(running, admitted, sequences)
                    began = True
                    async with self._sealed(running, sequences):
                        streams = [
                            self._stream(running, admitted, index, hold.rows, options)
                            for index in range(admitted.sampling.n)
                        ]
                        async with aclosing(in_turn(streams)) as steps:
                            async for index, step in steps:
                                output = sequences.add(index, step)
                                if output is not None:
                                    yield output
            finally:
                (self._registry.end if began else self._registry.release)(running)

    def _stream(
        self, running: Running, admitted: _Admitted, index: int, rows: dict[bytes, int], options: Mapping[str, Any]
    ) -> AsyncGenerator[Any]:
        """Generate one sequence."""
        sampling = admitted.sampling.clone()
        prompt_tokens = len(admitted.token_ids)
        plan = make_plan(running, index, prompt_tokens, rows, count_spare_positions(admitted.parameters))
        sampling.extra_args = {**(sampling.extra_args or {}), **(plan.to_extra_args() if plan else {})}
        if running.spec.capture is not None:
            # A captured prompt must be computed; reading it from the prefix cache would leave its rows out.
            sampling.skip_reading_prefix_cache = True
        if sampling.n > 1 and sampling.seed is not None:
            sampling.seed += index  # as vLLM does
        sampling.n = 1
        sampling.output_kind = RequestOutputKind.DELTA
        prompt, salt = admitted.prompt, running.cache_salt(prompt_tokens)
        if salt:
            prompt = {**prompt, "cache_salt": f"{prompt.get('cache_salt') or ''}/{salt}"}
        return self._generate(prompt, sampling, admitted.request_id, **options)

    async def _open(self, running: Running, admitted: _Admitted, sequences: Sequences) -> None:
        if running.spec.capture is None or self._delivery is None:
            return
        description = describe_capture(self._facts, running, admitted.token_ids, admitted.sampling.n)
        try:
            await self._delivery.open(description)
        except (asyncio.CancelledError, NoAnswerError):
            # The store may have opened the capture: nobody else would ever end it.
            self._registry.end(running)
            self._delivery.seal(aborted_seal(running, sequences.outcomes()))
            raise

    @asynccontextmanager
    async def _sealed(self, running: Running, sequences: Sequences) -> AsyncIterator[None]:
        """Seal the capture of a request however that ends."""
        seal = aborted_seal(running, [])
        try:
            yield
            if sequences.have_failed:
                blame(seal, _given_up())
        except Exception as error:
            if not sequences.have_generated:  # what failed afterwards has nothing to do with the capture
                blame(seal, self._cause(error))
            raise
        finally:
            # Cancellation (the caller closed the connection) comes here as well: ABORTED, unless all was generated.
            if sequences.have_generated:
                seal.outcome = capture_pb2.CAPTURE_STATE_COMPLETE
            if running.spec.capture is not None and self._delivery is not None:
                seal.sequences.extend(sequences.outcomes())
                self._delivery.seal(seal)

    def _cause(self, error: Exception) -> Exception:
        """Return the failure that an exception of vLLM's stands for, or itself."""
        if isinstance(error, EngineDeadError) or self._engine.is_dead:
            return Failure(Reason.ERROR_REASON_ENGINE_DEAD, "The engine has died; its log says why.")
        return error


@contextmanager
def _told_at_start(what: str) -> Iterator[None]:
    """Log what goes wrong at the start, and tell it to whoever asks for captures afterwards."""
    try:
        yield
    except Exception as error:
        _log.exception("nothing can be captured or steered", what=what, cause=str(error))
        raise Failure(
            Reason.ERROR_REASON_INTERNAL,
            f"This server can neither capture nor steer, because {what}: {str(error).rstrip('.')}. Its log "
            "says more. Requests that ask for neither are served.",
        ) from error


def facts_of(config: Any, settings: TapSettings) -> ModelFacts:
    """Return what is served.

    Args:
        config: vLLM's `VllmConfig`.
        settings: The settings.
    """
    model, parallel = config.model_config, config.parallel_config
    served = model.served_model_name
    return ModelFacts(
        name=served if isinstance(served, str) else model.model,
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        dtype=WIRE_TYPES[model.dtype],
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        eager=bool(model.enforce_eager),
        vllm_version=vllm.__version__,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        sites=tuple(site_numbers(settings)),  # type: ignore[arg-type]
        pool_bytes=0,
        table_bytes=0,
        ring_bytes=0,
        control_paths=(),
        model_runner=model_runner(config),
        encodings=tuple(ENCODINGS.values()),
        reductions=REDUCTIONS,
        capture_defaults=CaptureDefaults(
            ENCODINGS[settings.capture_encoding], settings.capture_rp_k, settings.capture_topk_k
        ),
    )


def _token_ids(prompt: Any) -> list[int]:
    """Return the tokens of a prompt as vLLM's endpoints hand it over.

    Raises:
        Failure: It is not of tokens alone.
    """
    is_tokens = isinstance(prompt, dict) and prompt.get("type", "token") == "token" and prompt.get("prompt_token_ids")
    if not is_tokens or prompt.get("multi_modal_data"):
        raise invalid(
            "prompt", "Requests with a prompt of text, or of token ids, are captured and steered; not this one."
        )
    return list(prompt["prompt_token_ids"])


def _capture_id(spec: ResolvedSpec, request_id: str) -> str:
    """Return what a request is called in the store: as the caller wishes, else as the answer's `id`."""
    if spec.request_id:
        return spec.request_id
    if spec.capture is None:
        return make_id()  # nobody will ask for it, and vLLM's may come again: a caller that repeats its X-Request-Id
    if is_valid_id(request_id):
        return request_id
    raise invalid(
        "request_id",
        f"The capture would be called {request_id[:128]!r}, and an id is 1 to 128 of a-z A-Z 0-9 . _ -; choose another "
        "X-Request-Id, or set request_id in the spec.",
    )


def _given_up() -> Failure:
    return Failure(Reason.ERROR_REASON_INTERNAL, "The engine gave the request up (error); its log may say why.")
