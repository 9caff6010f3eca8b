"""A worker extension that makes residuum misjudge the residual stream; see `test_wrong_guess.py`."""

from inference_svc.taps.model import structure

EXTENSION = f"{__name__}.WrongGuess"


class WrongGuess:
    """Adds nothing to a worker. Its purpose is that the worker's process imports this module."""


_adds_residual = structure.adds_residual
structure.adds_residual = lambda *arguments: not _adds_residual(*arguments)
