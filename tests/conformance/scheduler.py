"""vLLM's scheduler with a journal of its steps, in which tests check that their case really occurred.

It schedules like vLLM; a test may only slow it down. The engine's process imports it, because of `--engine-args`, and
one engine's steps are finished later.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from inference_svc.taps.vllm.worker import TappedWorker
from tests.conformance.journal import pace_file

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

JOURNAL_VARIABLE = "RESIDUUM_TEST_JOURNAL"
"""The environment variable with the path of the journal."""


_FINISHES_LATE = "eager"
"""The engine that finishes a step after its tokens were sampled, as on a GPU. On a CPU, vLLM always schedules
synchronously, so the other engine finishes it before."""


class JournalScheduler(Scheduler):
    """Writes a line of JSON for each step that computes tokens; see `journal.Step`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        path = Path(os.environ[JOURNAL_VARIABLE])
        self._journal = path.open("a", encoding="utf-8", buffering=1)
        self._pace = pace_file(path)
        self._preempted: list[str] = []
        if path.stem == _FINISHES_LATE:  # the worker is in this process
            TappedWorker._may_run_ahead = lambda _: True

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        output = super().schedule(*arguments, **options)
        preempted, self._preempted = self._preempted, []
        if output.num_scheduled_tokens:
            with suppress(FileNotFoundError):
                time.sleep(float(self._pace.read_text()))
            cached = output.scheduled_cached_reqs
            firsts = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
            firsts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            chunks = {name: (firsts[name], count) for name, count in output.num_scheduled_tokens.items()}
            replica = self.parallel_config.data_parallel_index
            self._journal.write(json.dumps({"chunks": chunks, "preempted": preempted, "replica": replica}) + "\n")
        return output

    def _preempt_request(self, request: Any, *arguments: Any, **options: Any) -> None:
        super()._preempt_request(request, *arguments, **options)
        self._preempted.append(request.request_id)
