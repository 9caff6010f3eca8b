"""The Python code that the page shows. It does what the page does."""

import numpy as np
import pytest

pytest.importorskip("starlette")

import residuum
from residuum.ui.gallery import Gallery
from residuum.ui.operations import operations_of
from tests.client.ui.page_script import called


@pytest.mark.parametrize("positions", ["last_prompt", "prompt"])
def test_a_direction_is_of_the_rows_that_the_form_names(positions):
    form = {"name": "joy", "method": "difference_of_means", "positions": positions, "chat": ""}
    given = {"positive": ["a"], "negative": ["b"]}
    code = called("core/python.js", "makeCode", {"form": form, "given": given, "about": {}})
    compile(code, "the page's code", "exec")
    (line,) = (line for line in code.splitlines() if line.startswith("direction = "))
    assert line.endswith(f'positions="{positions}")')


@pytest.mark.parametrize("site", ["resid_post", "z"])
@pytest.mark.parametrize(
    "changes",
    [
        {"from": "", "layers": "1-3"},
        {"from": "2", "layers": "all"},
        {"from": "2", "layers": "1-3", "phase": "generated"},
        {"from": "2", "layers": "1", "kind": "cap", "min": -1, "max": 4},
    ],
)
def test_operations_are_those_of_the_page(tmp_path, site, changes):
    vectors = {layer: np.full(4, layer, np.float32) for layer in (1, 2, 3)}
    direction = residuum.Directions(vectors, origin=residuum.directions.Origin(site=site))
    gallery = Gallery(tmp_path)
    gallery.save("joy", direction)
    item = {"kind": "add", "direction": "joy", "scale": 2, "phase": "all", **changes}
    if item["kind"] == "cap":
        del item["scale"]
    code = called("core/python.js", "operationCode", {**item, "variable": "direction"})
    copied = eval(code, {"residuum": residuum, "direction": direction})
    assert [found.to_proto() for found in copied] == [found.to_proto() for found in operations_of([item], gallery)]
    assert {found.site for found in copied} == {site}
