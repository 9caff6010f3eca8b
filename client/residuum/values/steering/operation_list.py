"""Operations as users give them to requests, and as the message that requests send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from residuum.exceptions import InvalidRequest
from residuum.v1 import steering_pb2
from residuum.values.selections.items import item_list
from residuum.values.steering.operations import (
    Ablate,
    Add,
    Cap,
    ClampFeature,
    Multiply,
    Operation,
    Replace,
    Set,
)
from residuum.values.tensors.vector import Vector
from residuum.wire.limits import MAX_OPERATIONS

_WHERE = "vector, layer=12, scale=6.0"


def operation_list(steer: Operation | Iterable[Operation] | None) -> list[Operation]:
    """Return the operations that a user gave as `steer=`, as a list.

    Raises:
        TypeError: An item is not an operation.
        InvalidRequest: There are more than 256 operations.
    """
    items = item_list(steer)
    for item in items:
        if not isinstance(item, (Add, Ablate, Cap, Replace, Set, Multiply, ClampFeature)):
            raise TypeError(
                "steer= takes residuum.Add, Ablate, Cap, Replace, Set, Multiply and ClampFeature, not "
                f"{_wrong_item(item)}"
            )
    if len(items) > MAX_OPERATIONS:
        raise InvalidRequest(
            f"A request takes at most {MAX_OPERATIONS} operations, not {len(items)}. Let one operation name several "
            "layers.",
            reason="INVALID_FIELD",
        )
    return items


def _wrong_item(item: object) -> str:
    """Return the end of an error message: the item that is not an operation, and what to write instead."""
    if isinstance(item, Mapping):
        return f"a {type(item).__name__}. Name the operation to apply, as in Add({{layer: vector}})."
    if isinstance(item, Vector):
        return f"{item!r}. Name the operation and the layer, as in Add({_WHERE})."
    if isinstance(item, (list, tuple)):
        return "a nested list. Write [*joy.add(0.5), Ablate(...)], with a star before each inner list."
    return f"{item!r}."


def steering_spec(operations: Iterable[Operation], *, updatable: bool = False) -> steering_pb2.SteeringSpec:
    """Return the message for operations, in this order."""
    return steering_pb2.SteeringSpec(operations=[operation.to_proto() for operation in operations], updatable=updatable)
