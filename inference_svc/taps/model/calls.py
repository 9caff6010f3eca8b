"""The calls of a model's modules in one run, with the tensors that went in and came out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import is_sequence, run_hooked, written_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Argument(NamedTuple):
    """An argument of a call: the index of a positional argument, or a keyword."""

    key: int | str

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of the argument in a call."""
        return args[self.key] if isinstance(self.key, int) else kwargs.get(self.key)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with another value of this argument."""
        if isinstance(self.key, int):
            return (*args[: self.key], value, *args[self.key + 1 :]), kwargs
        return args, {**kwargs, self.key: value}


def recorded_calls(model: nn.Module, run: Callable[[], object]) -> list[Call]:
    """Run a model, and return the calls of all its modules in the order in which they started."""
    calls: list[Call] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(_enter(calls), with_kwargs=True))
        handles.append(module.register_forward_hook(_leave(calls)))
    run_hooked(run, handles)
    return calls


class Call:
    """One call of a module. `entered` and `left` are the numbers of calls that had started by then."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entered: int) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.entered = entered
        self.left = 0
        self.output: tuple[Tensor, ...] = ()
        self.written: Argument | None = None
        """The argument that holds the output, if the call returned nothing."""

    def tensors(self) -> Iterator[tuple[Argument, Tensor]]:
        """Return the arguments that are tensors."""
        keys: list[int | str] = [*range(len(self.args)), *self.kwargs]
        for argument in map(Argument, keys):
            value = argument.of(self.args, self.kwargs)
            if isinstance(value, Tensor):
                yield argument, value

    def argument(self, tensor: Tensor) -> Argument | None:
        """Return the argument in which the call takes a tensor, if it does."""
        return next((argument for argument, value in self.tensors() if value is tensor), None)


def _enter(calls: list[Call]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(module, args, kwargs, len(calls)))

    return hook


def _leave(calls: list[Call]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del args
        call = next(call for call in reversed(calls) if call.module is module and not call.left)
        call.left = len(calls)
        values = [output] if isinstance(output, Tensor) else output
        call.output = tuple(value for value in values if isinstance(value, Tensor)) if is_sequence(values) else ()
        if output is None and (written := written_by(module, call.args, call.kwargs)) is not None:
            call.output, call.written = (written,), call.argument(written)

    return hook


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm. Nemotron's are of the class NemotronLayerNorm1P."""
    return type(module).__name__.lower().removesuffix("1p").endswith("norm")


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or one in it has parameters."""
    return next(module.parameters(), None) is not None
