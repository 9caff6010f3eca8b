"""Jobs that are refused before a prompt is sent, and credentials that are not shown. No service runs."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import ray

import residuum
import residuum.ray
from residuum.ray import captures as reading
from residuum.ray import extracting
from residuum.ray.files import extract_files
from residuum.ray.places import places_of
from residuum.ray.services import RayServices, make_plan

CAPTURE = residuum.Capture(layers=[0])
NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_output_with_files_is_refused_and_kept(cluster, tmp_path, scheme):
    """Ray would add the rows of the second job to those of the first."""
    old = tmp_path / "rows" / "old.parquet"
    old.parent.mkdir()
    old.write_bytes(b"rows")
    (tmp_path / "prompts.txt").write_text("The sea\n")
    job = {"address": "local", "limit": None, "column": "text", "capture": CAPTURE, "timeout": 2}
    with pytest.raises(residuum.InvalidRequest, match=r"rows has files.*choose another folder"):
        extract_files(str(tmp_path / "prompts.txt"), f"{scheme}{old.parent}", [NOWHERE], **job)
    assert old.read_bytes() == b"rows"
    old.unlink()
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1"):  # an empty folder is no reason to refuse
        extract_files(str(tmp_path / "prompts.txt"), f"{scheme}{old.parent}", [NOWHERE], **job)


def test_a_dataset_without_prompts_is_refused(cluster):
    with pytest.raises(residuum.InvalidRequest, match="has no prompts"):
        residuum.ray.extract(ray.data.from_items([]), [NOWHERE], capture=CAPTURE)


def test_an_actor_that_may_send_no_prompt_is_refused():
    """It would wait for ever. The check comes before the dataset is looked at."""
    with pytest.raises(residuum.InvalidRequest, match="max_concurrency must be at least 1, not 0"):
        residuum.ray.extract(None, [NOWHERE], capture=CAPTURE, max_concurrency=0)


def test_no_text_shows_the_token():
    """Ray may write the text of arguments to its logs, and its dashboard shows it."""
    settings = {"token": "secret-7", "endpoint": NOWHERE}
    places = places_of([NOWHERE], {"token": "secret-7"}, None)
    plan = extracting._Plan(None, places, "skip", 1, None, "ray-1")
    assert "secret-7" not in repr(plan)
    assert "secret-7" not in repr(make_plan("model", [], store=None, token="secret-7", python=None))
    assert "secret-7" not in repr(RayServices([], (), settings))
    assert "secret-7" not in repr(reading._Source(settings, None))


def test_a_store_of_the_wrong_type_is_named():
    told = r"store must be a text or a list of texts, not 5\."
    with pytest.raises(TypeError, match=told):
        residuum.ray.read_captures(NOWHERE, prefix="a", store=5)
    with pytest.raises(TypeError, match=told):
        make_plan("model", [], store=5, token="secret-7", python=None)


@pytest.mark.parametrize(("timeout", "wait"), [(0, 0), (5, 5), (None, True)])
def test_open_captures_are_waited_for_until_the_timeout(monkeypatch, timeout, wait):
    """With 0, a reading waited without a limit."""
    client = MagicMock()
    client.__enter__.return_value = client
    client._selected.return_value = [SimpleNamespace(capture_id="a", state="open", tenant="")]
    monkeypatch.setattr(reading._Source, "open", lambda _: client)
    monkeypatch.setattr(reading, "look_up", lambda *_: [])
    source = reading._Source({"timeout": timeout, "tenant": None}, None)
    with pytest.raises(residuum.InvalidRequest, match="no capture"):
        reading._look_up(source, None, "a", "", SimpleNamespace(allow_partial=False))
    client.manifest.assert_called_once_with("a", wait=wait)
