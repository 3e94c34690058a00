"""Reads settings from a TOML file and from options, and checks them against the pydantic model that documents them.

An unknown key fails with its dotted path and the nearest known name; a value out of range fails with what was
wanted.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kernelwright.errors import ConfigError
from kernelwright.files import TEXT_LIMIT_BYTES, read_regular

Model = TypeVar("Model", bound=BaseModel)


def require_http_url(url: str, example: str, what: str) -> None:
    """Check the address of `what`, such as `an endpoint`.

    Raises:
        ConfigError: it is no address of HTTP, or has a secret in it. The message never repeats it: it may be a key.
    """
    wanted = f"Wanted the address of {what}, such as {example}"
    if _is_http(url):
        if {"@", "?"} & set(url):
            raise ConfigError(f"{wanted}; found one with a user, password or query in it. Put the key into the environment.")
    elif "://" not in url and _is_http(f"http://{url}"):
        raise ConfigError(f"{wanted}; found one where http:// is missing. Put http:// or https:// in front of it.")
    else:
        raise ConfigError(
            f"{wanted}; found no http:// or https:// with a host behind it and a port up to 65535. Correct the address."
        )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is none
        return False


def read_toml(path: Path) -> dict[str, Any]:
    """The table in the file at `path`.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(read_regular(path, TEXT_LIMIT_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"Wanted settings in {path}, found: {error.strerror}. Name a TOML file.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Wanted TOML in {path}, found: {error}. Correct the file.") from error


@contextmanager
def in_file(path: Path | None, elsewhere: str = "") -> Iterator[None]:
    """Let a ConfigError that is raised in here name the file that the settings come from.

    Args:
        path: The file; None where there is none.
        elsewhere: Where else they come from, in words.
    """
    try:
        yield
    except ConfigError as error:
        if path is None or str(path) in str(error):
            raise
        raise ConfigError(f"{error} The file is {path}{elsewhere and f', besides {elsewhere}'}.") from error


def build(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Make `model` from `values`.

    Raises:
        ConfigError: a key is unknown or a value is of the wrong type or out of range.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(model, error)) from error


def first_problem(error: ValidationError) -> ErrorDetails:
    """The problem to tell first: an unknown key, since a misspelt one lacks under its right name too; else the first."""
    return min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    problem = first_problem(error)
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = list(model.model_fields)
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}."
        return f"Wanted a setting that exists, found `{path}`; {hint}"
    if not path:
        found = problem["msg"].removeprefix("Value error, ")
        return f"Wanted settings that agree with one another; {found}. Correct one of them."
    if problem["type"] == "missing":
        return f"Wanted a value for `{path}`, found none. Add it."
    return f"Wanted a valid `{path}`, found {problem['input']!r}: {problem['msg']}. Correct the setting."
