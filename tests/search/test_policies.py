"""Policies by their names."""

from __future__ import annotations

import pytest

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.search.policies import policy_named


def test_the_built_in_policy_has_a_name() -> None:
    assert policy_named("builtin").name == "builtin"


def test_a_name_alone_does_not_describe_a_language_model() -> None:
    with pytest.raises(PolicyError, match="does not say which language model"):
        policy_named("api")


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="policies are: builtin"):
        policy_named("oracle")
