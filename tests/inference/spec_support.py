"""Shared by the tests of specs."""

from __future__ import annotations

from inference_svc.admission.specs import ResolvedSpec, SharedSpec, SpecResolver


def resolve_spec(spec, facts):
    """Return a spec with every default filled in, for a model of which nothing is kept."""
    return SpecResolver(facts).resolve(spec)


def spec_of(request_id, capture=None, steering=None, probes=None):
    """Return a spec of resolved parts."""
    return ResolvedSpec(request_id, capture, SharedSpec(capture, steering, probes, own_probes=probes))
