"""The taps inside plain `vllm serve`: a worker class, and a plugin for vLLM's API server.

    vllm serve MODEL --worker-cls inference_svc.vllm_serve.Worker

docs/vllm-serve.md is for users. The worker, the plans, the captures, the stores, the shippers and the vectors are those
of the inference service. The front end does the work of the service's own process, inside vLLM's API server:

     openai client        | vLLM's API server                                        | engine core, workers
                          |                                                          |
     vllm_xargs -> HTTP --+> AsyncLLM.generate -> front.py -> extra_args: a plan ----+> Worker: TappedWorker
                          |   (plugin.py)          |
                          |                        +> delivery.py: OpenCaptures, SealCaptures, shippers

* The front end is in the API server because only the API server knows how a request ended: to the engine, a stop string
  looks like an abort.
* `plugin` wraps three methods of AsyncLLM. In an engine with another worker class it only refuses requests that ask for
  captures or steering. If vLLM lacks what the plugin needs, or does not load it, the worker refuses to start.
* `requests/xargs` reads the spec. It removes a plan that a caller sends under the plan's own name, because the worker
  trusts plans.
* `front` checks each request in the call of `generate` (`requests/request_admission`), before an endpoint begins its
  answer. So a bad spec gets status 400, also for a stream. Only requests in the first moments, before the workers have
  described themselves, are checked in their answer.
* `requests/request_runner` opens the capture before the caller gets anything, and seals it however the request ends.
* Each sequence is a request of its own in vLLM, and asks for output step by step, so its tokens are known whenever it
  ends. `requests/outputs` gives callers what vLLM would have given them.
* `requests/scored_streams` judges each output by its scores (`session/scores/rules.py`), and may end a sequence. The
  worker makes the memory of the scores; the API servers open it and divide it among them. vLLM's answers have no room
  for scores, so a middleware adds them to the JSON (`score_fields`).
* `delivery` has an event loop of its own, in a thread: vLLM stops its engine in a plain function, on the loop that
  serves HTTP.
* With several API servers, the first one starts the shippers and runs the self-test; a file beside the control sockets
  tells the others its result. They divide the rows of the vector bank and the room for signs among them, and share the
  callers' vectors in a folder beside the control sockets (`shared_vectors`).
"""

from __future__ import annotations

from typing import Any

WORKER = f"{__name__}.Worker"
"""The value for `--worker-cls`. The plugin recognizes a tapped engine by it, and leaves all other engines unchanged."""


MIDDLEWARE = f"{__name__}.score_fields.ScoreFields"
"""The value for `--middleware`. Without it, answers have no scores."""

SPEC_KEY = "residuum"
"""The key in `vllm_xargs` of the request's spec."""

VECTORS_KEY = "residuum_vectors"
"""The key in `vllm_xargs` of the request's vectors."""


def __getattr__(name: str) -> Any:
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only in workers, because importing vLLM's CPU worker replaces parts of torch.cuda.
    from inference_svc.vllm_serve.worker import worker_class

    return worker_class()
