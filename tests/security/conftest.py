from __future__ import annotations

from contextlib import contextmanager

import pytest

from inference_svc.server import SERVICE, InferenceServer
from inference_svc.settings import InferenceSettings
from store_svc.server import Store
from store_svc.settings import StoreSettings
from svc_common.security.access import Access
from tests.security.callers import Caller
from tests.security.certificates import Authority
from tests.security.tokens import Tokens


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch):
    for name in ("TOKEN", "TOKEN_FILE", "TLS", "TLS_CA", "TLS_SERVER_NAME", "CLIENT_CERT", "CLIENT_KEY", "INSECURE"):
        monkeypatch.delenv(f"RESIDUUM_{name}", raising=False)


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """The CA that the tests' services and clients trust."""
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """A CA that no service or client trusts."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="session")
def server_pair(authority):
    return authority.issue("server")


@pytest.fixture(scope="session")
def client_pair(authority):
    return authority.issue("client", names=())


@pytest.fixture
def store(tmp_path):
    """Runs stores in this process: a context manager that takes settings and yields the endpoint."""

    @contextmanager
    def run(**settings):
        running = Store(
            StoreSettings(**{"listen": "127.0.0.1:0", "path": tmp_path / "db", "grace_seconds": 1} | settings)
        )
        try:
            yield f"127.0.0.1:{running.port}"
        finally:
            running.stop()

    return run


@pytest.fixture
def tokens(tmp_path):
    return Tokens(tmp_path / "tokens.toml")


@pytest.fixture
async def inference(tmp_path):
    """Runs inference services without an engine: admitted calls fail because the model is loading."""
    running = []

    async def run(**settings):
        usual = {"listen": "127.0.0.1:0", "model": "none", "port_file": str(tmp_path / "port"), "store": ""}
        given = InferenceSettings(**usual | settings)
        access = Access(given.tokens, [SERVICE])
        running.append(await InferenceServer(given, str(tmp_path))._listen(access))
        return f"127.0.0.1:{(tmp_path / 'port').read_text().strip()}"

    yield run
    for server in running:
        await server.stop(0)


@pytest.fixture
def store_settings():
    """Return further settings of the store of `call`."""
    return {}


@pytest.fixture
def call(store, tokens, store_settings):
    """Makes callers of one store, with a tenant and rights."""
    callers = []
    with store(tokens=tokens.path, **store_settings) as endpoint:

        def make(tenant, *rights):
            callers.append(Caller(endpoint, tokens.add(tenant, *rights)))
            return callers[-1]

        yield make
        for caller in callers:
            caller.channel.close()
