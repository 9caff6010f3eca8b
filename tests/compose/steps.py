"""The steps of a client, the same in all rounds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import residuum
from tests.compose.outcome import FailedError, Outcome, expect
from tests.compose.project import DockerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from residuum.values.captures.activations import Activations
    from tests.compose.project import Project

PROMPT = "The capital of France is"
STORY = "Once upon a time, in a land far away,"
ALL = residuum.Capture(layers="all")
STORY_TOKENS = 1200
"""Tokens of a reply that is long enough to kill and restart a store while it is generated."""
TOKENS_BEFORE_KILL = 100
ROWS_SECONDS = 60.0
END_SECONDS = 300.0
HEALTHY_SECONDS = 120.0
_POLL_SECONDS = 0.05


def capture_all(client: residuum.Client, request_id: str, outcome: Outcome) -> Activations:
    """Generate with every layer of every token captured, and read it."""
    reply = client.generate(PROMPT, max_tokens=8, capture=ALL, request_id=request_id)
    expect("Paris" in reply.text, f"the reply does not mention Paris: {reply.text!r}")
    acts = client.activations(request_id)
    check(acts, client.info().num_layers, reply.usage.prompt_tokens + reply.usage.generated_tokens - 1)
    note(acts, outcome)
    outcome.say(f"captured {request_id}: {acts!r}")
    return acts


def check(acts: Activations, num_layers: int, num_positions: int) -> None:
    """Check that a capture is COMPLETE and has every row, with finite numbers."""
    expect(acts.manifest.is_complete, f"{acts!r} is not complete: {acts.manifest.describe_missing()}")
    expect(
        acts.layers == tuple(range(num_layers)) and len(acts.positions) == num_positions,
        f"{acts!r} does not have {num_layers} layers of {num_positions} positions",
    )
    expect(acts.manifest.num_rows == num_layers * num_positions, f"{acts.manifest.num_rows} rows in the manifest")
    for layer in acts.layers:
        norms = np.linalg.norm(acts[layer], axis=1)
        expect(np.isfinite(norms).all() and (norms > 0).all(), f"rows of layer {layer} are not finite, or zero")


def note(acts: Activations, outcome: Outcome) -> None:
    """Count a capture that was read."""
    outcome.captures += 1
    outcome.rows += acts.manifest.num_rows


def steer(client: residuum.Client, acts: Activations, outcome: Outcome) -> None:
    """Steer with a captured vector. Prompt rows move by exactly the vector, and rows of lower layers do not move."""
    layer, scale = 12, 4.0
    direction = acts[layer][-1] / np.linalg.norm(acts[layer][-1])
    prompt = residuum.Capture(layers=[layer - 1, layer], positions="prompt")
    operation = residuum.Add(residuum.Vector.from_array(direction), layer=layer, scale=scale)
    client.generate(PROMPT, max_tokens=1, capture=prompt, steer=operation, request_id="steered")
    steered = client.activations("steered")
    expect(steered.manifest.is_complete and steered.manifest.steered, f"{steered!r} is not marked as steered")
    rows = steered.positions
    expect(np.array_equal(steered[layer - 1], acts[layer - 1][rows]), "rows below the steered layer have changed")
    moved = (steered[layer] - acts[layer][rows]) @ direction
    # Rows are bfloat16 with 8 bits, so the error is at most 2^-8 of the row's length.
    slack = np.linalg.norm(acts[layer][rows], axis=1) / 2**7
    expect((abs(moved - scale) < slack).all(), f"steered rows moved by {moved.round(2)}, not by {scale}")
    note(steered, outcome)
    outcome.say(f"steered: {len(rows)} rows of layer {layer} moved by {np.median(moved):.2f} along a vector of {scale}")


def pull(endpoint: str, acts: Activations, folder: Path, environment: Mapping[str, str], outcome: Outcome) -> None:
    """Fetch a capture with the command into a file; check that it equals the rows read before, to the byte."""
    name, file = acts.manifest.capture_id, folder / "pulled.safetensors"
    run_command(endpoint, environment, "pull", name, "--out", str(file))
    pulled = residuum.Activations.from_safetensors(file)
    expect(same_rows(pulled, acts), f"{file.name} has other rows than {name}")
    outcome.say(f"pulled {name}: {file.stat().st_size} bytes")


def delete(
    client: residuum.Client, endpoint: str, names: Iterable[str], environment: Mapping[str, str], outcome: Outcome
) -> None:
    """Delete captures with the command; check that they are unknown and that no others exist."""
    names = list(names)
    expect(
        {item.capture_id for item in client.captures()} == set(names),
        "the store lists other captures than those of this round",
    )
    run_command(endpoint, environment, "rm", *names)
    for name in names:
        try:
            client.manifest(name)
        except residuum.UnknownCapture:
            continue
        raise FailedError(f"{name} is still there after it was deleted")
    expect(not list(client.captures()), "deleted captures are listed")
    outcome.say(f"deleted {len(names)} captures")


def run_command(endpoint: str, environment: Mapping[str, str], *arguments: str) -> str:
    """Run the `residuum` command; return its output."""
    name, *rest = arguments
    command = [sys.executable, "-m", "residuum", name, "--endpoint", endpoint, *rest]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"residuum {name} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def same_rows(one: Activations, other: Activations) -> bool:
    """Return whether two captures have the same rows, to the bit."""
    return one.layers == other.layers and all(
        one.raw(layer).tobytes() == other.raw(layer).tobytes() for layer in one.layers
    )


def survive(
    client: residuum.Client, project: Project, store: str, request_id: str, kill: Callable[[], None], outcome: Outcome
) -> Activations:
    """Kill a store while a capture is written to it; check that the capture ends COMPLETE after the store restarts.

    Args:
        client: A client of the services.
        project: The project of the services.
        store: The store's service, on which the capture is placed.
        request_id: The ID of the capture.
        kill: Kills the store's process with SIGKILL, and makes sure that it is started again.
        outcome: Counts the recovered rows.
    """
    story = {"max_tokens": STORY_TOKENS, "min_tokens": STORY_TOKENS}
    with client.stream(STORY, capture=ALL, request_id=request_id, **story) as stream:
        for count, _ in enumerate(stream):
            if count == TOKENS_BEFORE_KILL:
                break
        before = _some_rows(client, request_id)
        expect(not before.is_final, f"{request_id} had ended before its store was killed")
        started = project.inspect(store)["State"]["StartedAt"]
        kill()
        outcome.kills += 1
        generated_on = sum(len(delta.token_ids) for delta in stream)
        reply = stream.reply
    expect(generated_on > TOKENS_BEFORE_KILL, "the request had ended when the store was killed")
    _until_healthy(project, store)
    expect(project.inspect(store)["State"]["StartedAt"] != started, f"{store} was not restarted")
    after = client.manifest(request_id, wait=END_SECONDS)
    expect(after.is_complete, f"{request_id} is {after.state}: {after.describe_missing()}")
    acts = client.activations(request_id)
    check(acts, client.info().num_layers, reply.usage.prompt_tokens + reply.usage.generated_tokens - 1)
    note(acts, outcome)
    outcome.recovered += 1
    outcome.recovered_rows += after.num_rows - before.num_rows
    outcome.say(
        f"recovered {request_id}: {before.num_rows} rows were in {store} when it was killed, {after.num_rows} are now; "
        f"{after.state}"
    )
    return acts


def crash(project: Project, store: str) -> None:
    """Kill the store's process within its container, like a crash. The engine restarts it."""
    before = project.inspect(store)["RestartCount"]
    with contextlib.suppress(DockerError):  # the container ends with its first process, and so does this command
        project.execute(store, "python", "-c", _KILL)
    end = time.monotonic() + HEALTHY_SECONDS
    while project.inspect(store)["RestartCount"] == before:
        expect(time.monotonic() < end, f"{store} was not killed, or the engine did not restart it")
        time.sleep(_POLL_SECONDS)


_KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (folder / "cmdline").read_bytes().split(b"\\0")
    except OSError:  # a health check that has just ended
        continue
    if words[1:3] == [b"-m", b"store_svc"]:
        os.kill(int(folder.name), signal.SIGKILL)
"""
"""The image has no pkill. The store is a child of init in the container; the kernel protects init from such signals."""


def kill_container(project: Project, store: str) -> None:
    """Kill the container, and start it again, because the engine does not restart it."""
    project.compose("kill", "--signal", "KILL", store)
    state = project.inspect(store)["State"]
    expect((state["Running"], state["ExitCode"]) == (False, 137), f"{store} was not killed: {state}")
    project.compose("start", store)


def _some_rows(client: residuum.Client, request_id: str) -> residuum.Manifest:
    """Wait until some rows are written, and return the manifest."""
    end = time.monotonic() + ROWS_SECONDS
    while not (manifest := client.manifest(request_id)).num_rows:
        expect(time.monotonic() < end, f"no row of {request_id} reached the store")
        time.sleep(_POLL_SECONDS)
    return manifest


def _until_healthy(project: Project, service: str) -> None:
    end = time.monotonic() + HEALTHY_SECONDS
    while (state := project.inspect(service)["State"])["Health"]["Status"] != "healthy":
        expect(time.monotonic() < end, f"{service} is not healthy again: {state['Health']['Log'][-1:]}")
        time.sleep(1)
