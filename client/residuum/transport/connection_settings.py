"""A client's credentials: from its arguments or, without these, from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, Union

from residuum.exceptions import BadCredentials
from residuum.protocol.arguments import check_flag, is_flag, short
from residuum.rpc.credentials import TLS, Credentials, CredentialsError

_Channel = TypeVar("_Channel")

Token = Union[str, "os.PathLike[str]", None]
"""A token, or the file that holds it."""

_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def resolve_credentials(*, token: Token, tls: TLS | bool | None, insecure: bool | None) -> Credentials:
    """Return the credentials of a client. Arguments that are None come from the environment.

    Args:
        token: A token, or a `Path` of its file; "" sends none. Environment: RESIDUUM_TOKEN or RESIDUUM_TOKEN_FILE.
        tls: TLS settings; True trusts public CAs, False uses plain text. Environment: RESIDUUM_TLS_CA,
            RESIDUUM_CLIENT_CERT, RESIDUUM_CLIENT_KEY and RESIDUUM_TLS_SERVER_NAME, or RESIDUUM_TLS=1.
        insecure: Whether a token may be sent to another machine in plain text. Environment: RESIDUUM_INSECURE.

    Raises:
        BadCredentials: The credentials cannot be used, or contradict each other.
        TypeError: An argument has the wrong type.
    """
    allowed = _switch("RESIDUUM_INSECURE") if insecure is None else check_flag("insecure", insecure)
    try:
        credentials = Credentials(tls=_tls(tls), insecure=allowed, **_token(token))
        credentials.check_files()
    except CredentialsError as error:
        raise BadCredentials(str(error)) from None
    return credentials


def check_channel(credentials: Credentials, endpoint: str) -> None:
    """Check that no token would be sent in plain text to another machine.

    Raises:
        BadCredentials: A token would be sent that way, and the credentials do not allow it.
    """
    try:
        credentials.check_endpoint(endpoint)
    except CredentialsError as error:
        raise BadCredentials(str(error)) from None


def opener(open_channel: Callable[..., _Channel], credentials: Credentials) -> Callable[[str], _Channel]:
    """Return a function that opens a channel with these credentials, and raises BadCredentials if it cannot."""

    def open_one(endpoint: str) -> _Channel:
        try:
            return open_channel(endpoint, credentials=credentials)
        except CredentialsError as error:
            raise BadCredentials(str(error)) from None

    return open_one


def describe(credentials: Credentials) -> str:
    """Return a description of the credentials for people. It never contains the token."""
    tls = credentials.tls
    if tls is None:
        way = "plain text"
    else:
        way = f"TLS, trusting {tls.ca or 'public CAs'}" + (f", presenting {tls.cert}" if tls.cert else "")
    token = f"a token from {credentials.token_file}" if credentials.token_file else "a token"
    return f"{way}, with {token if credentials.has_token else 'no token'}"


def _token(token: Token) -> dict[str, str]:
    if token is None:
        token, file = os.environ.get("RESIDUUM_TOKEN", ""), os.environ.get("RESIDUUM_TOKEN_FILE", "")
        if token and file:
            raise CredentialsError("RESIDUUM_TOKEN and RESIDUUM_TOKEN_FILE are both set. Unset one of them.")
        return {"token": token, "token_file": file}
    if isinstance(token, bytes) or not isinstance(token, (str, os.PathLike)):  # the error must not show the token
        raise TypeError(f"token must be a text, or a Path of its file, not {type(token).__name__}.")
    return {"token": token} if isinstance(token, str) else {"token_file": os.fspath(token)}


def _tls(tls: TLS | bool | None) -> TLS | None:  # noqa: FBT001 - as the user wrote it
    if isinstance(tls, TLS):
        return tls
    if tls is not None:
        if not is_flag(tls):
            raise TypeError(f"tls must be True, False or residuum.TLS, such as TLS(ca='ca.pem'), not {short(tls)}.")
        return TLS() if tls else None
    environment = {
        field: os.environ.get(f"RESIDUUM_{name}") or None
        for field, name in (
            ("ca", "TLS_CA"),
            ("cert", "CLIENT_CERT"),
            ("key", "CLIENT_KEY"),
            ("server_name", "TLS_SERVER_NAME"),
        )
    }
    return TLS(**environment) if _switch("RESIDUUM_TLS") or any(environment.values()) else None


def _switch(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text not in _SWITCHES:
        raise BadCredentials(f"{name} is {text!r}. Set it to 1 or 0.")
    return _SWITCHES[text]
