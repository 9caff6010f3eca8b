"""Both clients have the same public names, and each name the same signature but for async."""

from __future__ import annotations

import inspect
import re

import pytest

import residuum

TWINS = [(residuum.Client, residuum.AsyncClient), (residuum.Stream, residuum.AsyncStream)]
RENAMED = {"aclose": "close"}
"""Names that Python's protocols require to differ."""

NOT_IN_SYNC = {residuum.AsyncStream: {"open"}}
"""A synchronous stream is open from the start."""

SYNC_WORDS = {
    "AsyncClient": "Client",
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "AsyncStream": "Stream",
}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def sync_type(annotation):
    """Return an annotation, which is a text here, as the synchronous client has it."""
    return re.sub(r"\bAsync\w+", lambda found: SYNC_WORDS[found[0]], str(annotation))


def shape(method, annotation=str):
    """Return names, kinds, defaults and annotations of the parameters, and the annotation of the result."""
    signature = inspect.signature(method)
    parameters = [
        (item.name, item.kind, item.default, annotation(item.annotation)) for item in signature.parameters.values()
    ]
    return parameters, annotation(signature.return_annotation)


def pairs():
    return [
        pytest.param(sync, aio, name, id=f"{aio.__name__}.{name}")
        for sync, aio in TWINS
        for name in sorted(public(aio) - NOT_IN_SYNC.get(aio, set()))
    ]


@pytest.mark.parametrize(("sync", "aio"), TWINS)
def test_the_public_names_are_the_same(sync, aio):
    names = {RENAMED.get(name, name) for name in public(aio) - NOT_IN_SYNC.get(aio, set())}
    assert public(sync) == names


@pytest.mark.parametrize(("sync", "aio", "name"), pairs())
def test_a_method_has_the_same_signature(sync, aio, name):
    one, other = inspect.getattr_static(sync, RENAMED.get(name, name)), inspect.getattr_static(aio, name)
    assert type(one) is type(other)
    if isinstance(one, property):
        one, other = one.fget, other.fget
    assert not inspect.iscoroutinefunction(one)
    assert not inspect.isasyncgenfunction(other)  # it would check arguments only when iterated
    assert shape(one) == shape(other, sync_type)


@pytest.mark.parametrize(("sync", "aio", "name"), pairs())
def test_a_method_is_documented_in_both(sync, aio, name):
    one, other = getattr(sync, RENAMED.get(name, name)), getattr(aio, name)
    assert one.__doc__
    assert other.__doc__


def test_clients_are_made_with_the_same_arguments():
    assert shape(residuum.Client.__init__) == shape(residuum.AsyncClient.__init__, sync_type)


def test_everything_but_iterators_is_awaited():
    """Everything is awaited except methods that return an iterator."""
    for name in public(residuum.AsyncClient):
        method = inspect.getattr_static(residuum.AsyncClient, name)
        lazy = str(inspect.signature(method).return_annotation).startswith("Async")
        assert inspect.iscoroutinefunction(method) != lazy, name


@pytest.mark.parametrize("kind", [residuum.AsyncClient, residuum.AsyncStream, residuum.Client, residuum.Stream])
def test_the_module_of_a_class_is_the_public_one(kind):
    home = "residuum.aio" if kind.__name__.startswith("Async") else "residuum.client"
    assert kind.__module__ == home
    assert f"{home}.{kind.__name__}" in repr(kind)


@pytest.mark.parametrize("call", [lambda client: client.follow(""), lambda client: client.captures(states="no-such")])
def test_bad_arguments_are_refused_when_an_iterator_is_made(kind, call):
    with pytest.raises(residuum.InvalidRequest):
        call(kind("localhost:1"))


@pytest.mark.parametrize("name", ["captures", "follow", "generate_as_completed"])
def test_what_is_read_bit_by_bit_is_declared_as_a_generator(name):
    """So type checkers know that it can be closed, and contextlib.closing and aclosing take it."""
    for kind, declared in ((residuum.Client, "Generator["), (residuum.AsyncClient, "AsyncGenerator[")):
        assert inspect.signature(getattr(kind, name)).return_annotation.startswith(declared)
