"""`residuum token`: creates a token, for operators who maintain a tokens file. It contacts no service."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from residuum.cli.output import Output
from residuum.wire.tokens import ANY_TENANT, RIGHTS, is_valid_tenant, make_token, token_hash


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    tenant = "the tenant that the token acts for; * for any tenant (no default: required)"
    parser.add_argument("--tenant", required=True, type=_tenant, metavar="NAME", help=tenant)
    rights = f"the token's rights, separated by commas: {', '.join(RIGHTS)} (no default: required)"
    parser.add_argument("--rights", required=True, type=_rights, metavar="RIGHTS", help=rights)
    parser.add_argument("--days", type=_days, metavar="N", help="expire after this many days (default: never)")
    parser.add_argument(
        "--name", default="", type=_note, help="a note for people, such as the token's owner (default: none)"
    )
    parser.add_argument("--append", metavar="FILE", help="append the entry to this tokens file (default: print it)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for programs (default: text for people)"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Create a token and print it. It is never shown again."""
    if options.tenant == ANY_TENANT and not set(options.rights) <= {"write", "admin"}:
        options.usage_error("--tenant '*' may have only the rights write and admin; name a tenant")
    token = make_token()
    entry = _entry(options, token)
    if options.append:
        with Path(options.append).open("a", encoding="utf-8") as file:
            file.write(f"\n{entry}")
    if output.as_json:
        output.json({"token": token, "entry": None if options.append else entry})
    elif options.append:
        output.say(token)  # nothing else, so that it can be redirected into a file
    else:
        output.say("# The token. It is shown only once. Give it to its user and to nobody else.")
        output.say(token)
        output.say("\n# Its entry for the services' tokens file (--tokens FILE). It does not contain the token itself.")
        output.say(entry)
    return 0


def _entry(options: argparse.Namespace, token: str) -> str:
    lines = [
        "[[token]]",
        f'hash = "{token_hash(token)}"',
        f'tenant = "{options.tenant}"',
        f"rights = {json.dumps(options.rights)}",
    ]
    if options.days is not None:
        expires = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=options.days)
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    if options.name:
        lines.append(f"name = {_quoted(options.name)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a TOML string. TOML escapes as JSON does, except for surrogate pairs and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _note(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that Python could not decode
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return text


def _tenant(text: str) -> str:
    if text != ANY_TENANT and not is_valid_tenant(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid tenant name: use 1 to 128 of a-z A-Z 0-9 . _ - and do not start with . or -"
        )
    return text


def _rights(text: str) -> list[str]:
    rights = [name.strip() for name in text.split(",")]
    for name in rights:
        if name not in RIGHTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a right; choose among {', '.join(RIGHTS)}")
    return rights


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36_500:  # noqa: PLR2004 - a century, within datetime's range
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from above 0 to 36500")
    return days
