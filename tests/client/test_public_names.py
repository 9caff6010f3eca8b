"""The public names, and the cost of importing them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import residuum
from residuum import exceptions
from residuum.transport import failures
from residuum.v1 import capture_pb2, errors_pb2

ROOT = Path(__file__).parents[2]

NAMES = """
    Ablate AbortedCapture Activations Add AlreadyExists Archive ArchiveUnreachable AsyncClient AsyncStream
    AttentionLayer BadCredentials BadSAE BadVector BatchCancelled BatchFailed BatchInterrupted CallerStalled Cap Capture
    CaptureEnded CaptureExists CaptureNotComplete CapturePage CaptureSummary ClampFeature Client ClientClosed
    DamagedCapture DeadlineExceeded Directions EMA EmptyCaptureWarning EmptyPrompt EngineDead Export ExtractStopped
    ExtractSummary Extracted Gate GateRecord Health IncompleteCapture InvalidRequest LayerRows LeftOutWarning
    Lens LensMap LimitReached LogitLens Logprobs Manifest MessageSpan MissingSAE MissingVectors ModelInfo Multiply
    NoMessageSpans NoStore NoTokenTexts NotFound NotServing NotUpdatable OpenCapture OutageWarning PatchSweep
    PermissionDenied Piece Positions Probe ProbeAttention ProbeLayer PromptTooLong PutResult PutSAEResult
    QuotaExceeded Registration Replace Reply RequestAborted RequestExists ResiduumError ResourceExhausted RollingMax
    RollingMean RowSet Rows Rule RuleEvent SAE Sampling SearchHit SearchResult Sequence SequenceOutcome ServerFault
    ServiceLoad Set SilentStoreWarning SteeringChange SteeringRecord StoreFull StoreFullCapture StoreStats
    StoreUnreachable StoredRow Stream TLS TokenDelta Unauthenticated Unavailable Unembedding UnknownCapture
    UnknownLayer UnknownModel UnknownOperation UnknownRequest UnknownSite Unreachable Usage Vector __version__
    attention_weights directions load_vectors sae serve vllm_xargs
""".split()  # noqa: SIM905 - one name a line would fill the screen


def test_public_names():
    assert sorted(residuum.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(residuum, name) is not None
        assert name in dir(residuum)
    assert len(set(dir(residuum))) == len(dir(residuum))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = residuum.nothing


def test_both_clients_have_the_same_methods():
    def methods(kind):
        return {name: value for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}

    ours, theirs = methods(residuum.Client), methods(residuum.AsyncClient)
    assert set(ours) == set(theirs)
    for name, method in ours.items():
        assert inspect.signature(method).parameters == inspect.signature(theirs[name]).parameters, name


def test_everything_public_is_documented():
    for name in set(NAMES) - {"__version__"}:
        value = getattr(residuum, name)
        assert value.__doc__, name
        if inspect.isclass(value):
            for member, thing in vars(value).items():
                if not member.startswith("_") and (callable(thing) or isinstance(thing, property)):
                    assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


WITH_FIELDS = [
    name
    for name in NAMES
    if name == "Sampling"
    or (dataclasses.is_dataclass(getattr(residuum, name)) and not hasattr(getattr(residuum, name), "keep_norm"))
]
"""The classes whose docstrings describe their fields. Steering operations share theirs, and only the site has them."""


@pytest.mark.parametrize("name", WITH_FIELDS)
def test_help_describes_every_field(name: str):
    kind = getattr(residuum, name)
    fields = [item.name for item in dataclasses.fields(kind)] if name != "Sampling" else list(kind.__annotations__)
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext).partition("Attributes:")[2]
    described = re.findall(r"^ \|      (\w+): \S", shown, re.MULTILINE)
    assert described[: len(fields)] == fields


def loaded_by(code):
    script = f"import sys; {code}; print(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "client")},
    )
    return set(result.stdout.split())


def test_import_is_light():
    modules = loaded_by("import residuum")
    assert not modules & {"grpc", "numpy", "rich", "torch", "vllm", "lmdb", "google.protobuf"}


def test_the_client_is_light():
    names = ("Client", "AsyncClient", "Activations", "directions")
    modules = loaded_by("import residuum; " + "; ".join(f"residuum.{name}" for name in names))
    assert not modules & {"rich", "torch", "vllm", "lmdb", "pydantic", "structlog", "safetensors", "gguf"}


def test_shared_modules_import_without_the_client():
    modules = loaded_by("import residuum.wire.rows.frames, residuum.rpc.errors, residuum.v1.store_pb2")
    assert not modules & {"residuum.client", "residuum.exceptions", "residuum.values.captures.activations"}


def test_every_reason_has_an_exception():
    names = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert set(failures.EXCEPTIONS) == names
    assert all(issubclass(kind, residuum.ResiduumError) for kind in failures.EXCEPTIONS.values())


def test_the_exception_tree_in_the_docstring_is_right():
    drawn = exceptions.__doc__
    for name, kind in inspect.getmembers(exceptions, inspect.isclass):
        if issubclass(kind, BaseException):
            assert f"{name} " in drawn.replace("\n", " "), name


def _errors():
    """Return one exception of every class."""
    manifest = residuum.Manifest.from_proto(capture_pb2.CaptureManifest())
    special = {
        residuum.Unreachable: lambda: residuum.Unreachable("away", endpoint="host:1"),
        residuum.ExtractStopped: lambda: residuum.ExtractStopped("line 3", residuum.EmptyPrompt("empty"), 2, 9),
        residuum.BatchFailed: lambda: residuum.BatchFailed([None], {0: residuum.EmptyPrompt("empty", reason="X")}),
        **{
            kind: lambda kind=kind: kind("not whole", manifest, reason="OVERFLOW")
            for kind in vars(exceptions).values()
            if inspect.isclass(kind) and issubclass(kind, residuum.CaptureNotComplete)
        },
    }
    for _, kind in inspect.getmembers(exceptions, inspect.isclass):
        if issubclass(kind, residuum.ResiduumError):
            yield special.get(kind, lambda kind=kind: kind("what", reason="WHY", metadata={"request_id": "r"}))()


@pytest.mark.parametrize("error", list(_errors()), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_exceptions_survive_pickling(error, again):
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, other.reason, other.metadata) == (
        str(error), error.args, error.reason, error.metadata,
    )  # fmt: skip
    assert vars(other).keys() == vars(error).keys()
    assert getattr(other, "manifest", None) == getattr(error, "manifest", None)
    assert getattr(other, "endpoint", None) == getattr(error, "endpoint", None)


@pytest.mark.parametrize("kind", [residuum.BatchInterrupted, residuum.BatchCancelled])
def test_interrupted_batches_survive_pickling(kind):
    """concurrent.futures pickles what a worker process raises, also after Ctrl-C."""
    failure = residuum.EmptyPrompt("empty", reason="EMPTY_PROMPT")
    other = pickle.loads(pickle.dumps(kind([None], {0: failure}, can_skip=True)))
    assert (type(other), str(other)) == (kind, str(kind([None], {}, can_skip=True)))
    assert (other.replies, other.errors[0].reason) == ([None], "EMPTY_PROMPT")


class BareError(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "some detail"

    def trailing_metadata(self):
        return ()


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_codes_without_a_reason_are_mapped(code):
    error = failures.from_rpc_error(BareError(code), "host:1", request_id="r")
    expected = {
        "UNAVAILABLE": residuum.Unreachable,
        "DEADLINE_EXCEEDED": residuum.DeadlineExceeded,
        "NOT_FOUND": residuum.NotFound,
        "INVALID_ARGUMENT": residuum.InvalidRequest,
        "OUT_OF_RANGE": residuum.InvalidRequest,
        "ALREADY_EXISTS": residuum.AlreadyExists,
        "RESOURCE_EXHAUSTED": residuum.ResourceExhausted,
        "DATA_LOSS": residuum.DamagedCapture,
        "CANCELLED": residuum.RequestAborted,
        "UNAUTHENTICATED": residuum.Unauthenticated,
        "PERMISSION_DENIED": residuum.PermissionDenied,
    }
    assert type(error) is expected.get(code.name, residuum.ServerFault)
    assert "host:1" in str(error)
    assert error.request_id == error.capture_id == "r"
    assert error.reason == ""


def test_a_newer_servers_reason_is_mapped_by_its_code():
    class NewerError(BareError):
        def trailing_metadata(self):
            from google.rpc import error_details_pb2, status_pb2

            info = error_details_pb2.ErrorInfo(reason="SOMETHING_NEW", domain="residuum.dev")
            status = status_pb2.Status(code=5)
            status.details.add().Pack(info)
            return (("grpc-status-details-bin", status.SerializeToString()),)

    assert type(failures.from_rpc_error(NewerError(grpc.StatusCode.NOT_FOUND), "host:1")) is residuum.NotFound


def test_clients_work_in_a_notebook(endpoint):
    """Inside a running event loop, as in a notebook's cell."""

    async def cell():
        with residuum.Client(endpoint) as client:
            return client.generate("a", max_tokens=2).text

    assert asyncio.run(cell()) == " 2 3"
