"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`).

It adds the front end to AsyncLLM by wrapping three public methods: `__init__`, `generate`, which every endpoint calls,
and `shutdown`. An engine with another worker class works as before, except that requests to capture or steer are
refused.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

from inference_svc.vllm_serve import SPEC_KEY, VECTORS_KEY, WORKER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_FRONT = "_residuum"
"""The attribute of an AsyncLLM that holds its front end."""

_GENERATE = ("self", "prompt", "sampling_params", "request_id")
"""The first parameters that `AsyncLLM.generate` must have."""

_USED = ("abort", "collective_rpc", "errored", "generate", "get_supported_tasks", "shutdown")
"""The attributes of AsyncLLM that the front end uses."""

_state: dict[str, str | None] = {"problem": "vLLM has not loaded the plugin"}
_died: list[bool] = []
"""For each engine that stopped in this process, whether it was dead before."""


def problem() -> str | None:
    """Return why this process's vLLM does not have the front end; None if it has."""
    return _state["problem"]


def has_engine_died() -> bool:
    """Return whether an engine of this process died, and was not stopped."""
    return any(_died)


def register() -> None:
    """Add the front end to vLLM's AsyncLLM.

    vLLM may call this several times, and in processes that never create an AsyncLLM.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    if not hasattr(AsyncLLM, _FRONT):
        _state["problem"] = _missing(AsyncLLM)
        if _state["problem"] is None:
            _wrap(AsyncLLM)


def _missing(kind: Any) -> str | None:
    """Return what this version of vLLM lacks; None if it lacks nothing."""
    lacking = [name for name in _USED if not hasattr(kind, name)]
    if lacking:
        return f"AsyncLLM of the installed vLLM has no {', '.join(lacking)}"
    parameters = tuple(inspect.signature(kind.generate).parameters)
    if parameters[: len(_GENERATE)] != _GENERATE:
        return f"AsyncLLM.generate of the installed vLLM takes {', '.join(parameters)}, not {', '.join(_GENERATE)}"
    return None


def _wrap(kind: Any) -> None:
    init, generate, shutdown = kind.__init__, kind.generate, kind.shutdown

    @functools.wraps(init)
    def start(llm: Any, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        make_front = _front_end_factory(vllm_config)
        init(llm, vllm_config, *arguments, **options)
        if make_front is not None:
            index, count = options.get("client_index", 0), options.get("client_count", 1)
            setattr(llm, _FRONT, make_front(llm, functools.partial(generate, llm), index, count))

    @functools.wraps(generate)
    def generate_tapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        front = getattr(llm, _FRONT)
        if front is None:
            _check_untapped(getattr(sampling_params, "extra_args", None))
            return generate(llm, prompt, sampling_params, request_id, **options)
        return front.generate(prompt, sampling_params, request_id, options)

    @functools.wraps(shutdown)
    def stop(llm: Any, *arguments: Any, **options: Any) -> None:
        front = getattr(llm, _FRONT)
        if front is None or front.is_stopping:  # vLLM calls this again, also when the object is deleted
            shutdown(llm, *arguments, **options)
            return
        front.is_stopping = True
        _died.append(llm.errored)
        if _blocks_event_loop():  # so no request can end meanwhile
            try:
                front.seal_captures()
            finally:
                shutdown(llm, *arguments, **options)
                front.close()
            return
        try:
            shutdown(llm, *arguments, **options)  # running requests may end normally meanwhile
        finally:
            front.close_later()

    setattr(kind, _FRONT, None)
    kind.__init__, kind.generate, kind.shutdown = start, generate_tapped, stop


def _blocks_event_loop() -> bool:
    """Return whether the caller keeps the event loop from running, as functions that it calls do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_untapped(extra_args: Mapping[str, Any] | None) -> None:
    """Check that a request to an engine without the front end does not ask to capture or steer.

    Otherwise vLLM would answer it and capture nothing. Requests with a plan pass: the inference service sends those to
    its own engine.

    Raises:
        VLLMValidationError: The request asks to capture or steer, or has a misspelt argument.
    """
    if not extra_args:
        return
    from inference_svc.taps.plan import KEY

    if [*extra_args] == [KEY]:  # each request of the inference service that captures or steers
        return
    from inference_svc.admission.fields import invalid
    from inference_svc.vllm_serve.requests.refusals import as_http_errors, http_error
    from inference_svc.vllm_serve.requests.xargs import check_argument_names

    with as_http_errors():
        check_argument_names(extra_args)
    if SPEC_KEY not in extra_args and VECTORS_KEY not in extra_args:
        return
    raise http_error(
        invalid(
            f"vllm_xargs.{SPEC_KEY}",
            f"This server can neither capture nor steer: it was started without --worker-cls {WORKER}. Ask its "
            "operator to add that, or leave `residuum` out of vllm_xargs.",
        )
    )


def _front_end_factory(vllm_config: Any) -> Callable[..., Any] | None:
    """Return a function that creates the front end of an engine; None if the engine has another worker class.

    Raises:
        SystemExit: The settings are invalid, or not supported here, before the model is loaded.
    """
    if vllm_config.parallel_config.worker_cls != WORKER:
        return None
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise SystemExit(
            "vllm serve with residuum: data parallelism is not supported, because the plugin reaches only the first "
            "replica's workers. Remove --data-parallel-size and the other arguments of data parallelism, or use the "
            "inference service, `residuum serve`, which supports it."
        )
    from inference_svc.admission.rules_file import RulesFile, RulesFileError
    from inference_svc.engine.worker_settings import LONGEST_STEP_SECONDS
    from inference_svc.tap_settings import TapSettings
    from inference_svc.vllm_serve.front import FrontEnd
    from svc_common.logs import configure_own_logs
    from svc_common.settings import BadSettingsError, from_environment, log_unknown_variables

    try:
        settings = from_environment(TapSettings)
        rules = RulesFile(settings.rules_file) if settings.rules_file is not None else None
    except (BadSettingsError, RulesFileError) as error:
        raise SystemExit(f"vllm serve with residuum: bad settings\n{error}") from None
    api_servers = vllm_config.parallel_config._api_process_count  # noqa: SLF001 - vLLM has no public name
    if settings.max_active_vectors < api_servers:
        raise SystemExit(
            f"vllm serve with residuum: RESIDUUM_MAX_ACTIVE_VECTORS is {settings.max_active_vectors}, but the "
            f"{api_servers} API servers divide this number among them, and each needs at least one. Set a higher "
            "number, or fewer API servers with --api-server-count."
        )
    configure_own_logs(settings.log_level)
    log_unknown_variables(TapSettings)
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(LONGEST_STEP_SECONDS))
    return functools.partial(FrontEnd, settings, rules)
