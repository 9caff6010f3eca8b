"""Lets only its own page talk to the app: a token, a cookie, and checks against other pages in the same browser.

The page itself and its scripts are public, as the wheel is. Everything under /api needs the cookie, which the page gets
for the token in its URL. A browser sends the cookie of a host to every port of it, so other pages on this machine could
send it, too. Three checks stop them: the Host header must name a loopback address (against DNS rebinding), the Origin
header of calls that change something must be this app's, and the browser must not say that another site asks
(Sec-Fetch-Site).
"""

from __future__ import annotations

import hmac
import http.cookies
import secrets
import urllib.parse

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from residuum.rpc.credentials import is_loopback
from residuum.ui.answers import body_of

SESSION = "/api/session"
"""Where the page trades the token for the cookie."""

_LARGEST_BODY = 4096
"""Bytes of a body with a token. Everyone on the machine may send one."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""The headers of every response."""


def new_token() -> str:
    """Return a random token for the URL."""
    return secrets.token_urlsafe(32)


class Guard:
    """ASGI middleware: refuses requests that do not come from the app's own page, and adds the security headers."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    async def open_session(self, request: Request) -> Response:
        """Set the cookie, if the body has the token. This is the endpoint at `SESSION`."""
        given = (await body_of(request, _LARGEST_BODY)).get("token")
        if not isinstance(given, str) or not self._is_token(given):
            return _refused(403, "This token is wrong. Open the address that `residuum ui` printed.")
        response = JSONResponse({})
        response.set_cookie(_cookie_name(request.scope), self._token, httponly=True, samesite="strict", path="/")
        return response

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), str(scope["path"])
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            return _refused(403, f"This app answers only at loopback addresses such as 127.0.0.1, not at {host!r}.")
        if not path.startswith("/api/"):
            return None
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return _refused(403, "Another site asked the browser for this.")
        if scope["method"] not in {"GET", "HEAD"} and headers.get("origin", f"http://{host}") != f"http://{host}":
            return _refused(403, f"The origin {headers['origin']!r} is another site's.")
        if path != SESSION and not self._has_cookie(scope, headers):
            return _refused(401, "The token is missing. Open the address that `residuum ui` printed.")
        return None

    def _has_cookie(self, scope: Scope, headers: Headers) -> bool:
        cookies: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except http.cookies.CookieError:
            return False
        found = cookies.get(_cookie_name(scope))
        return found is not None and self._is_token(found.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _name_of(host: str) -> str:
    """Return the name or address in a Host header; empty if there is none."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:  # a bracket without its other half
        return ""


def _cookie_name(scope: Scope) -> str:
    """Return the cookie's name. It has the port, because the apps at all ports of a host share their cookies."""
    return f"residuum-ui-{scope['server'][1]}"


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": {"kind": "Refused", "message": message}}, status_code=status)
