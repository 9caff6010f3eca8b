"""A worker extension that has the taps take the residual stream for what it is not; see `test_wrong_guess.py`."""

from inference_svc.taps.model import structure

EXTENSION = f"{__name__}.WrongGuess"


class WrongGuess:
    """Nothing is added to a worker; what counts is that its process imports this module."""


_adds_residual = structure.adds_residual
structure.adds_residual = lambda *arguments: not _adds_residual(*arguments)
