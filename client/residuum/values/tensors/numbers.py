"""Numbers and arrays that users give, as numpy and the contract know them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from residuum.exceptions import InvalidRequest


def finite_float32(what: str, value: Any) -> float:
    """Return a number as a float. Arrays and tensors of one element count as numbers.

    Args:
        what: What the number is, for the error, such as "Add: scale".
        value: The number.

    Raises:
        TypeError: The value is not one number.
        InvalidRequest: The number is not finite, or beyond float32.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number, not {value!r}.")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # an array or tensor of several elements
        raise TypeError(f"{what} must be one number, not {type(value).__name__} of several.") from None
    if not math.isfinite(number) or abs(number) > 3.4e38:  # noqa: PLR2004 - the largest float32
        raise InvalidRequest(f"{what} must be a finite float32, not {number}.", reason="INVALID_FIELD")
    return number


def without_torch(values: Any) -> Any:
    """Return a torch tensor as a numpy array, and anything else as it is.

    numpy takes no tensor on a GPU, none that requires a gradient, and none of bfloat16 or float8.
    """
    if not hasattr(values, "detach"):
        return values
    tensor = values.detach().cpu()
    is_short = tensor.is_floating_point() and tensor.element_size() < 4  # noqa: PLR2004 - float32
    return (tensor.float() if is_short else tensor).numpy()
