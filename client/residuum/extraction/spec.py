"""What a job does, as one JSON document. A job continues only with the same document."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from google.protobuf import json_format

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag, check_text
from residuum.protocol.sampling import sampling_parameters
from residuum.values.captures.capture import Capture
from residuum.values.model.info import ModelInfo
from residuum.values.steering.operation_list import steering_spec
from residuum.values.steering.operations import Operation

OnError = Literal["stop", "skip"]
"""What to do with a prompt that fails: stop the job, or leave the prompt out."""

OnLong = Literal["fail", "skip", "truncate"]
"""What to do with a prompt that is longer than `context_length`."""

_SHORTEST_WINDOW = 2
_OF_SEVERAL_ROWS = ("mean", "max", "sum")
"""The reductions that mix rows."""
DEFAULT_SHARD_BYTES = 256 << 20

ROWS = "rows"
"""What the services decide of the rows, in a job's document. Those of earlier versions lack it."""


@dataclass(frozen=True)
class JobSpec:
    """The arguments of `Client.extract` that decide which rows a job makes, and how it works."""

    capture: Capture
    column: str = "text"
    keep: tuple[str, ...] = ()
    chat: bool = False
    steer: Sequence[Operation] = ()
    model: str | None = None
    limit: int | None = None
    shuffle: int | None = None
    context_length: int | None = None
    on_long: OnLong = "fail"
    dtype: Literal["stored", "float32"] = "stored"
    shard_bytes: int = DEFAULT_SHARD_BYTES
    pack: bool = False
    separator: int | Literal["bos", "eos"] | None = "bos"
    tokenizer: str | os.PathLike[str] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check the arguments, before anything is read or sent.

        Raises:
            InvalidRequest: One is invalid.
            TypeError: One has the wrong type.
        """
        if not isinstance(self.capture, Capture):
            raise TypeError(f"capture= takes a residuum.Capture, not {self.capture!r}.")
        check_text("column", self.column)
        if self.model is not None:
            check_text("model", self.model)
        check_flag("chat", self.chat)
        check_flag("pack", self.pack)
        sampling_parameters(dict(self.sampling))
        for name in ("logprobs", "prompt_logprobs"):
            if self.sampling.get(name) is not None:
                raise InvalidRequest(
                    f"{name}= cannot be used here: a job keeps rows, not log-probabilities. Use generate_many."
                )
        for name, value in (
            ("limit", self.limit),
            ("context_length", self.context_length),
            ("shard_bytes", self.shard_bytes),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidRequest(f"{name}= must be a whole number of at least 1, not {value!r}.")
        for name, text, choices in (
            ("dtype", self.dtype, ("stored", "float32")),
            ("on_long", self.on_long, ("fail", "skip", "truncate")),
        ):
            if text not in choices:
                raise InvalidRequest(f"{name}={text!r} does not exist. Choose among {', '.join(choices)}.")
        self._check_packing()

    def _check_packing(self) -> None:
        if not self.pack:
            if self.tokenizer is not None:
                raise InvalidRequest("tokenizer= needs pack=True: without it, the server tokenizes the prompts.")
            if self.separator != "bos":
                raise InvalidRequest(
                    f"separator={self.separator!r} needs pack=True: only packed prompts have a separator."
                )
            return
        if self.context_length is None or self.context_length < _SHORTEST_WINDOW:
            raise InvalidRequest("pack=True needs context_length=, the tokens of a window: at least 2.")
        if self.chat:
            raise InvalidRequest("pack=True and chat=True exclude each other: a conversation cannot be packed.")
        if self.on_long == "truncate":
            raise InvalidRequest(
                "on_long='truncate' and pack=True exclude each other: long documents become several windows."
            )
        if self.capture.reduction in _OF_SEVERAL_ROWS:
            raise InvalidRequest(
                f"reduction={self.capture.reduction!r} and pack=True exclude each other: a window has rows of several "
                "documents, and their reduction would count as a row of the last one."
            )
        is_id = isinstance(self.separator, int) and not isinstance(self.separator, bool) and self.separator >= 0
        if not is_id and self.separator not in ("bos", "eos", None):
            raise InvalidRequest(f"separator= must be 'bos', 'eos', a token ID or None, not {self.separator!r}.")
        if isinstance(self.separator, str) and self.tokenizer is None:
            raise InvalidRequest(
                f"separator={self.separator!r} needs tokenizer=, the model's folder. Or give a token ID, or None."
            )

    def document(self, prompts: int, info: ModelInfo, packing: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that decides which rows the job makes.

        Args:
            prompts: The number of prompts.
            info: What the services say of themselves.
            packing: For packed prompts: the ID of the token between documents, and the tokenizer's digest.
        """
        return {
            "capture": json_format.MessageToDict(self.capture.to_proto(), preserving_proto_field_name=True),
            "steering": json_format.MessageToDict(steering_spec(self.steer)) if self.steer else {},
            "sampling": dict(sorted(self.sampling.items())),
            "model": info.model,
            "adapter": self.model or "",
            "column": self.column,
            "keep": list(self.keep),
            "chat": self.chat,
            "limit": self.limit,
            "shuffle": self.shuffle,
            "context_length": self.context_length,
            "on_long": self.on_long,
            "dtype": self.dtype,
            "shard_bytes": self.shard_bytes,
            "prompts": prompts,
            ROWS: self._rows(info),
            **packing,
        }

    def _rows(self, info: ModelInfo) -> dict[str, str]:
        """Return what the services decide: the encoding, if the capture names none, and the dtype of rows in files."""
        encoding = self.capture.encoding or info.default_encoding
        stored = {"raw": info.dtype, "fp16": "float16", "bf16": "bfloat16"}.get(encoding, "float32")
        return {"dtype": stored if self.dtype == "stored" else self.dtype, "encoding": encoding}


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the digest of a job's document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two documents, for people, such as "limit was 100 and is 200"."""
    old, new = dict(_flat(before)), dict(_flat(now))
    names = [*old, *(name for name in new if name not in old)]
    return [
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, {}, []):
            yield f"{prefix}{name}".removesuffix(".list.layers"), value


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)
