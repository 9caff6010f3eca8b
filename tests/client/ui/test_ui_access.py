"""The app of `residuum ui` answers only its own page."""

import pytest

pytest.importorskip("starlette")

from tests.client.ui.ui_page import TOKEN, Page


@pytest.fixture
def page(endpoint, tmp_path):
    running = Page(endpoint, tmp_path / "gallery")
    yield running
    running.stop()


def status(page, path="/api/about", method="GET", body=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return page.raw(method, path, body, {"Cookie": page.cookie, **named})[0]


def test_the_page_is_served_with_a_strict_policy(page):
    code, headers, content = page.raw("GET", "/")
    assert code == 200
    assert b"<title>" in content
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"


def test_calls_need_the_cookie(page):
    assert status(page) == 200
    assert page.raw("GET", "/api/about")[0] == 401
    assert page.raw("GET", f"/api/about?token={TOKEN}")[0] == 401
    name = page.cookie.partition("=")[0]
    assert status(page, Cookie=f"{name}=wrong") == 401
    assert status(page, Cookie=f"other={TOKEN}") == 401
    assert status(page, Cookie="=;;\t") == 401


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", None, 7, "\u00e9"])
def test_a_wrong_token_gives_no_cookie(page, token):
    code, headers, content = page.raw("POST", "/api/session", {"token": token})
    assert code == 403
    assert "set-cookie" not in headers
    assert TOKEN.encode() not in content


def test_the_cookie_is_for_this_site_alone(page):
    _, headers, _ = page.raw("POST", "/api/session", {"token": TOKEN})
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert str(page.port) in cookie.partition("=")[0]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]", "[::1", "x@", "a/b"]
)
def test_other_host_names_are_refused(page, host):
    """DNS rebinding: another site's name that resolves to 127.0.0.1."""
    assert status(page, Host=host) == 403
    assert status(page, path="/", Host=host) == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_names_are_accepted_at_any_port(page, host):
    """A tunnel may have another port at the browser's side."""
    assert status(page, Host=f"{host}:9999") == 200


def test_calls_of_other_origins_are_refused(page):
    for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
        assert status(page, "/api/stop", "POST", {"id": "x"}, Origin=origin) == 403
    assert status(page, "/api/stop", "POST", {"id": "x"}, Origin=f"http://{page.host}", Host=page.host) == 404
    for site in ("cross-site", "same-site"):
        assert status(page, Sec_Fetch_Site=site) == 403
    assert status(page, Sec_Fetch_Site="same-origin") == 200


def test_unknown_paths_and_methods(page):
    assert status(page, "/api/nothing") == 404
    assert status(page, "/api/stop") == 404
    assert status(page, "/../app.py") == 404
    assert status(page, "/%2e%2e/app.py") == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100000])
def test_bodies_that_are_no_json_object_are_refused(page, body):
    assert status(page, "/api/stop", "POST", body) == 400


def test_without_a_token_only_small_bodies_are_read(page):
    code, _, content = page.raw("POST", "/api/session", {"token": "x" * 4096})
    assert code == 400
    assert b"4096 bytes" in content


def test_a_body_that_is_too_large_is_refused(page, monkeypatch):
    monkeypatch.setattr("residuum.ui.answers.LARGEST_BODY", 1000)
    assert status(page, "/api/stop", "POST", b" " * 1001) == 400
