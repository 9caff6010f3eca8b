"""Captures and steers without generated stubs, with only what the services' reflection provides.

    python round.py VECTOR OUT [raw|fp32|fp16|bf16]

VECTOR is a file of little-endian float32, as many as the model's hidden size. OUT is a folder. ../README.md describes
the files in OUT, and the environment variables for the connection. Needs grpcio-reflection, grpcio-status, crc32c and
numpy, and nothing of residuum.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from contract import Service, describe, reason_of
from rows import Rows, shape_of

INFERENCE, STORE = "residuum.v1.InferenceService", "residuum.v1.StoreService"
PROMPT = "The most surprising thing about the ocean is"
MAX_TOKENS = 64
SCALE = 4.0
WAIT = "60s"


def main() -> None:
    """Read the command line and run all steps."""
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["raw"], ["fp32"], ["fp16"], ["bf16"]):
        print("usage: round.py VECTOR OUT [raw|fp32|fp16|bf16]", file=sys.stderr)
        raise SystemExit(2)
    encoding = "".join(sys.argv[3:]) or "raw"
    try:
        do_round(Path(sys.argv[1]), Path(sys.argv[2]), f"ENCODING_{encoding.upper()}")
    except grpc.RpcError as error:
        raise SystemExit(describe(error)) from None
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


def do_round(vector_file: Path, out: Path, encoding: str) -> None:
    """Register, send the vector, generate and follow, read again, and write the results."""
    with Service(os.environ.get("RESIDUUM_ENDPOINT", "localhost:50051"), INFERENCE) as inference:
        info = inference.unary("GetModelInfo", {})
        vector = read_vector(inference, vector_file, info.hidden_size)
        request_id, sent = register(inference, info.num_layers, vector, encoding)
        reply = generate_and_follow(inference, request_id)
    manifest, rows, asked = read_again(info.stores, request_id)
    shape = shape_of(manifest)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.f32").write_bytes(rows.array(shape).astype("<f4").tobytes())
    (out / "followed.f32").write_bytes(reply["followed"].array(shape).astype("<f4").tobytes())
    summary = {
        "request_id": request_id,
        "store": reply["store"],
        "asked": asked,
        "state": "CAPTURE_STATE_COMPLETE",
        "digest": base64.b64decode(vector["digest"]).hex(),
        "vectors_sent": sent,
        "prompt_token_ids": list(manifest.description.prompt_token_ids),
        "generated_token_ids": reply["token_ids"],
        "text": reply["text"],
        "rows_before_end": reply["rows_before_end"],
        **shape._asdict(),
    }
    (out / "capture.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{len(shape.layers)} layers × {len(shape.positions)} positions × {shape.width}:{reply['text']}")


def read_vector(inference: Service, path: Path, length: int) -> dict[str, str]:
    """Read a vector from a file of little-endian float32, and compute its digest by the rule in tensor.proto."""
    values = path.read_bytes()
    if len(values) != 4 * length:
        raise ValueError(
            f"{path} has {len(values)} bytes; a vector for this model is {length} float32 values, {4 * length} bytes."
        )
    dtype = inference.enum("DataType").values_by_name["DATA_TYPE_FLOAT32"]
    digest = hashlib.sha256(b"residuum.vector.v1" + struct.pack("<IQ", dtype.number, length) + values).digest()
    return {"digest": _base64(digest), "dtype": dtype.name, "values": _base64(values)}


def register(inference: Service, num_layers: int, vector: dict[str, str], encoding: str) -> tuple[str, int]:
    """Register a request that captures two layers and is steered after the first. Send the vector if it is missing.

    Returns:
        The request's ID, and how many vectors were sent.
    """
    middle, last = num_layers // 2, num_layers - 1
    add = {"layers": {"list": {"layers": [middle]}}, "add": {"digest": vector["digest"], "scale": SCALE}}
    capture = {"layers": {"list": {"layers": [middle, last]}}, "encoding": encoding}
    answer = inference.unary("RegisterRequest", {"spec": {"capture": capture, "steering": {"operations": [add]}}})
    if not answer.missing_digests:
        return answer.request_id, 0
    for result in inference.send("PutVectors", [{"vector": vector}]).results:
        if result.HasField("error"):  # each vector has its own result
            reason = inference.enum("ErrorReason").values_by_number[result.error.reason].name
            raise ValueError(f"{reason}: vector {result.digest.hex()}: {result.error.message}")
    return answer.request_id, 1


def generate_and_follow(inference: Service, request_id: str) -> dict[str, Any]:
    """Generate, and follow the capture in another thread at the same time."""
    sampling = {"maxTokens": MAX_TOKENS, "temperature": 0, "ignoreEos": True}
    events = inference.stream("Generate", {"requestId": request_id, "text": PROMPT, "sampling": sampling})
    handle = next(events).started.capture
    reply: dict[str, Any] = {"store": handle.store, "token_ids": [], "text": "", "followed": Rows()}
    with ThreadPoolExecutor(max_workers=1) as pool, Service(handle.store_endpoint, STORE) as store:
        chunks = store.stream("ReadChunks", {"captureId": handle.capture_id, "follow": True})
        following = pool.submit(read_chunks, chunks, reply["followed"])
        following.add_done_callback(lambda ended: events.cancel() if ended.exception() else None)
        try:
            for event in events:
                if event.HasField("delta"):
                    reply["token_ids"] += event.delta.token_ids
                    reply["text"] += event.delta.text
                elif event.HasField("finished"):
                    reply["rows_before_end"] = len(reply["followed"])
        except grpc.RpcError as error:
            chunks.cancel()
            if error.code() is grpc.StatusCode.CANCELLED:
                following.result()  # if following failed first, it cancelled the generation, so its error is the cause
            raise
        following.result()
    return reply


def read_again(stores: Any, capture_id: str) -> tuple[Any, Rows, list[str]]:
    """Read an ended capture from its store. Stores are asked in the order of their ranks.

    Returns:
        The manifest, the rows, and the names of the stores that were asked.
    """
    asked = []
    for address in sorted(stores, key=lambda item: (-score(item.name, capture_id), item.name.encode())):
        asked.append(address.name)
        with Service(address.endpoint, STORE) as store:
            try:
                manifest = store.unary("GetCapture", {"captureId": capture_id, "wait": WAIT}).manifest
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and reason_of(error) == "UNKNOWN_CAPTURE":
                    continue
                raise
            state = store.enum("CaptureState").values_by_number[manifest.state].name
            if state != "CAPTURE_STATE_COMPLETE":
                raise ValueError(f"The capture is {state}: {manifest.incomplete_detail}")
            rows = Rows()
            return read_chunks(store.stream("ReadChunks", {"captureId": capture_id}), rows), rows, asked
    raise ValueError(f"No store holds {capture_id}; asked: {', '.join(asked)}.")


def read_chunks(responses: Any, rows: Rows) -> Any:
    """Read chunks into rows. Return the last manifest, which lists the rows that count."""
    manifest = None
    for response in responses:
        if response.HasField("chunk"):
            rows.add(response.chunk)
        elif response.HasField("manifest"):
            manifest = response.manifest
    if manifest is None:
        raise ValueError("The store sent no manifest.")
    return manifest


def score(store: str, capture_id: str) -> int:
    """Return the rank score of a store for a capture; the rule is in placement.proto."""
    name = store.encode()
    digest = hashlib.sha256(b"residuum.store.v1" + struct.pack("<I", len(name)) + name + capture_id.encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    main()
