"""Settings of a service. One declaration defines its flags, environment variables, configuration file and help.

Precedence: flag, environment variable `RESIDUUM_...`, file (`--config FILE` or `RESIDUUM_CONFIG`, TOML), default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from residuum.wire.endpoints import parse_endpoint
from svc_common.environment import PREFIX, unknown_variables
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic_core import ErrorDetails
    from pydantic_settings import PydanticBaseSettingsSource

_Settings = TypeVar("_Settings", bound="ServiceSettings")

_log = get_logger(__name__)

_SOURCES_HELP = (
    "Each setting can also be set as an environment variable, RESIDUUM_ and its name, or in a TOML file: --config FILE "
    "or RESIDUUM_CONFIG. A flag overrides the environment, and the environment overrides the file."
)


def _endpoint(text: str) -> str:
    parse_endpoint(text, listening=True)
    return text


def _optional_endpoint(text: str) -> str:
    return _endpoint(text) if text else ""


Endpoint = Annotated[str, AfterValidator(_endpoint)]
"""A setting of the form host:port, to listen on."""

OptionalEndpoint = Annotated[str, AfterValidator(_optional_endpoint)]
"""A setting of the form host:port to listen on, or empty."""


def _optional_url(text: str) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://, as in http://localhost:4317")
    return text


OptionalUrl = Annotated[str, AfterValidator(_optional_url)]
"""A setting that is a URL, or empty."""


class _File(TomlConfigSettingsSource):
    """A TOML file. Names of settings may be written with underscores, or with dashes as in their flags."""

    def __init__(self, settings_cls: type[BaseSettings], path: str) -> None:
        try:
            super().__init__(settings_cls, path)
        except ValueError as error:
            raise ValueError(f"{path} is not TOML: {error}") from None

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for written, value in super().__call__().items():
            name = written.replace("-", "_")
            if name in values:
                raise ValueError(f"{self.toml_file_path} sets {name} twice, with dashes and with underscores")
            values[name] = value
        return values


class ServiceSettings(BaseSettings):
    """Base class of a service's settings. Subclasses are frozen, and document each field for --help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True)
    config_file: ClassVar[str | None] = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - part of pydantic's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - part of pydantic's signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources, strongest first. Flags override all of them."""
        sources = [init_settings, env_settings]
        if cls.config_file:
            sources.append(_File(settings_cls, cls.config_file))
        return tuple(sources)

    def check_folders(self) -> None:
        """Check that the folders that the settings name exist on this machine, where the service starts.

        Raises:
            BadSettingsError: One does not.
        """


def load_settings(kind: type[_Settings], program: str, arguments: Sequence[str], *, epilog: str = "") -> _Settings:
    """Read the settings of a service. If any is bad, exit with a message that lists all bad ones.

    An unknown environment variable whose name is close to one of these settings is bad, too.
    `log_unknown_variables` logs other unknown variables once logging is set up.

    Args:
        kind: The class of the settings.
        program: The command, for the help.
        arguments: The command line after the program.
        epilog: The last paragraph of the help.
    """
    try:
        settings = read_settings(kind, program, arguments, epilog=epilog)
        settings.check_folders()
    except WrongFlagsError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2)
    except BadSettingsError as error:
        sys.exit(f"{program}: bad settings\n{error}")
    return settings


def read_settings(kind: type[_Settings], program: str, arguments: Sequence[str], *, epilog: str = "") -> _Settings:
    """Read the settings of a service; see `load_settings`. Only --help exits.

    Raises:
        WrongFlagsError: A flag is unknown, or its value is missing or cannot be read.
        BadSettingsError: A setting is bad, or an unknown variable's name is close to one of them.
    """
    arguments, path = _take_config(list(arguments))
    if path and not os.path.isfile(path):  # noqa: PTH113 - one check, no path object otherwise
        raise BadSettingsError(f"  config: the file {path!r} does not exist")
    located = type(
        kind.__name__,
        (kind,),
        {"config_file": path, "__module__": kind.__module__, "__doc__": f"{kind.__doc__} {_SOURCES_HELP}"},
    )
    flags: CliSettingsSource[Any] = CliSettingsSource(
        located,
        cli_prog_name=program,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,  # argparse would print all flags
    )
    _hide_python_types(flags.root_parser)
    flags.root_parser.epilog = epilog
    try:
        values = flags(args=arguments)  # --help exits here
    except SettingsError as error:
        message = str(error).removeprefix("error parsing CLI: ")
        raise WrongFlagsError(f"{message}. {program} --help lists all flags.") from None

    def read() -> _Settings:
        settings: _Settings = located(_cli_settings_source=values)
        return settings

    return _checked(kind, read)


_METAVARS = {
    "int": "N",
    "float": "N",
    "str": "TEXT",
    "Path": "PATH",
    "ByteSize": "SIZE",
    "tuple[str,...]": "LIST",
    "dict[str,Any]": "JSON",
}
"""The placeholder of a value in --help, by the type that pydantic-settings would print."""
_NO_DEFAULT = re.compile(r"\(default(?: factory: dict|: (?:\(\)|null|\{\})?)\)$")
_DEFAULTS = re.compile(r"(Default: .*\.) \(default[^()]*\)$", re.DOTALL)
"""A text that says what the default is, and then what pydantic-settings adds."""
_TUPLE = re.compile(r"\(default: \((.+?),?\)\)$")


def _hide_python_types(parser: argparse.ArgumentParser) -> None:
    """Make --help name kinds of values instead of Python types."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list them
        if isinstance(action.metavar, str):
            action.metavar = _METAVARS.get(action.metavar, action.metavar)
        text = _DEFAULTS.sub(r"\1", _NO_DEFAULT.sub("(default: none)", action.help or ""))
        action.help = _TUPLE.sub(lambda found: "(default: " + found[1].replace("'", "") + ")", text)


class BadSettingsError(ValueError):
    """Settings are bad. The message has a line for each problem."""


class WrongFlagsError(BadSettingsError):
    """A flag is unknown, or its value is missing or cannot be read."""


def from_environment(kind: type[_Settings]) -> _Settings:
    """Read settings from the environment only.

    Raises:
        BadSettingsError: A setting is bad, or an unknown variable's name is close to one of them.
    """
    return _checked(kind, kind)


def log_unknown_variables(kind: type[ServiceSettings]) -> None:
    """Log unknown RESIDUUM_ environment variables; see `unknown_variables`."""
    if unknown := list(unknown_variables(kind.model_fields)):
        _log.warning("ignoring unknown environment variables", variables=unknown)


def _checked(kind: type[_Settings], read: Callable[[], _Settings]) -> _Settings:
    """Return the settings that `read` returns.

    Raises:
        BadSettingsError: Some are bad. The message lists all problems at once.
    """
    problems = []
    try:
        settings = read()
    except ValidationError as error:
        problems = [_explain(kind, problem) for problem in error.errors()]
    except ValueError as error:  # a file that is not TOML, or a value that is not JSON
        problems = [str(error)]
    # Never show the values: a misspelled variable may hold a token.
    problems += [
        f"{name}: unknown setting. Did you mean {' or '.join(meant)}? If it is for another program, unset it here"
        for name, meant in unknown_variables(kind.model_fields).items()
        if meant
    ]
    if problems:
        raise BadSettingsError("\n".join(f"  {problem}" for problem in problems))
    return settings


def _take_config(arguments: list[str]) -> tuple[list[str], str | None]:
    for at, argument in enumerate(arguments):
        if argument == "--config" and at + 1 < len(arguments):
            return arguments[:at] + arguments[at + 2 :], arguments[at + 1]
        if argument.startswith("--config="):
            return arguments[:at] + arguments[at + 1 :], argument.removeprefix("--config=")
    return arguments, os.environ.get("RESIDUUM_CONFIG")


def _explain(kind: type[ServiceSettings], problem: ErrorDetails) -> str:
    """Return one line about a problem."""
    location, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if not location:  # settings that contradict each other; the message names them
        return message
    if problem["type"] == "extra_forbidden":  # without the value, which may be a token
        return f"{_flag(location)} ({_variable(location)}): {_unknown(kind, location)}"
    if problem["type"] == "missing":
        return f"{_flag(location)} ({_variable(location)}): this setting is required"
    if problem["type"].startswith("byte_size"):
        message = "this is not a size. Give a number of bytes, or a number with a unit, such as 50GiB"
    # An object is that of engine-args, which may hold a token.
    given = "" if isinstance(problem["input"], dict) else f" (given: {problem['input']!r})"
    return f"{_flag(location)} ({_variable(location)}): {message}{given}"


def _unknown(kind: type[ServiceSettings], location: tuple[int | str, ...]) -> str:
    """Return the message for an unknown setting, with the setting that was probably meant."""
    meant = difflib.get_close_matches(str(location[0]), kind.model_fields, n=1)
    return "unknown setting. " + (f"Did you mean {_flag((meant[0],))}?" if meant else "See --help")


def _variable(location: tuple[int | str, ...]) -> str:
    return PREFIX + "_".join(str(part) for part in location).upper()


def _flag(location: tuple[int | str, ...]) -> str:
    return "--" + ".".join(str(part) for part in location).replace("_", "-")
