"""Shared by the tests of specs."""

from __future__ import annotations

from inference_svc.admission.specs import SpecResolver


def resolve_spec(spec, facts):
    """Return a spec with every default filled in, for a model of which nothing is kept."""
    return SpecResolver(facts).resolve(spec)
