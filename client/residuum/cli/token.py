"""`residuum token`: makes a token, for the one who keeps the services' tokens file. It calls nobody."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from residuum.cli.output import Output
from residuum.wire.tokens import ANY_TENANT, RIGHTS, is_valid_tenant, make_token, token_hash


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    whose = "whose captures it is for; * is any tenant's (no default: name it)"
    parser.add_argument("--tenant", required=True, type=_tenant, metavar="NAME", help=whose)
    which = f"what it allows, separated by commas: {', '.join(RIGHTS)} (no default: name them)"
    parser.add_argument("--rights", required=True, type=_rights, metavar="RIGHTS", help=which)
    parser.add_argument("--days", type=_days, metavar="N", help="let it expire after so many days (default: never)")
    parser.add_argument(
        "--name", default="", type=_note, help="a note for people: whose it is, and where (default: none)"
    )
    parser.add_argument("--append", metavar="FILE", help="add the entry to this tokens file (default: print it)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs (default: for people)")


def run(options: argparse.Namespace, output: Output) -> int:
    """Make a token, and show it, this once."""
    if options.tenant == ANY_TENANT and not set(options.rights) <= {"write", "admin"}:
        options.usage_error("--tenant '*' is for the rights write and admin alone")
    token = make_token()
    entry = _entry(options, token)
    if options.append:
        with Path(options.append).open("a", encoding="utf-8") as file:
            file.write(f"\n{entry}")
    if output.as_json:
        output.json({"token": token, "entry": None if options.append else entry})
    elif options.append:
        output.say(token)  # and nothing else, so that it can be sent into a file
    else:
        output.say("# The token. It is shown this once: give it to whoever is to call, and to nobody else.")
        output.say(token)
        output.say("\n# Its entry in the tokens file of the services (--tokens FILE). It does not tell the token.")
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
    """Return a TOML string. What JSON escapes, TOML does likewise, but for pairs of surrogates and for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _note(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):  # bytes of the command line that are no text
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return text


def _tenant(text: str) -> str:
    if text != ANY_TENANT and not is_valid_tenant(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no tenant: take 1 to 128 of a-z A-Z 0-9 . _ -, with no dot or dash first"
        )
    return text


def _rights(text: str) -> list[str]:
    rights = [name.strip() for name in text.split(",")]
    for name in rights:
        if name not in RIGHTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no right; there are {', '.join(RIGHTS)}")
    return rights


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36_500:  # noqa: PLR2004 - a century; datetime ends somewhere
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0")
    return days
