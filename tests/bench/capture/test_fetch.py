"""A client in a separate process fetches captures, as in bench.isolated."""

import pytest

from bench.capture.sinks.fetcher import Fetcher
from bench.capture.sinks.sink import Arrived
from bench.processes import RunFailedError
from bench.store.captures import Shape
from bench.store.lane import running_lane

SHAPE = Shape(layers=2, hidden=16, positions=40)


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    with running_lane(tmp_path_factory.mktemp("lane") / "lane", shippers=1, ring_mib=8, max_gib=1) as lane:
        yield lane


@pytest.fixture
async def fetcher(lane):
    made = Fetcher([f"a={lane.endpoint}"])
    yield made
    await made.stop()


async def test_the_client_holds_every_row_of_all_captures(lane, fetcher):
    names = ["a", "b", "c"]
    lane.open(names, SHAPE)
    lane.feed(names, SHAPE)
    lane.seal(names, SHAPE)
    assert await fetcher.fetch(names) == Arrived(3 * 2 * 40, 3 * 2 * 40 * 16 * 2)


async def test_a_capture_that_cannot_be_fetched_is_an_error(fetcher):
    with pytest.raises(RunFailedError, match=r"fetch_client failed: .*nobody"):
        await fetcher.fetch(["nobody"])


async def test_a_dead_client_is_an_error(lane):
    fetcher = Fetcher([lane.endpoint])
    fetcher._client.process.kill()
    fetcher._client.process.wait()
    with pytest.raises(RunFailedError, match="fetch_client has ended"):
        await fetcher.fetch(["a"])
