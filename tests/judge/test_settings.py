"""Settings: no unknown key, nothing out of range."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kernelwright.config import build
from kernelwright.errors import ConfigError
from kernelwright.judge import Settings
from kernelwright.records import Label


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="no_such_setting"):
        Settings(no_such_setting=1)
    with pytest.raises(ValidationError, match="no_such_setting"):
        Settings.quick(no_such_setting=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processes_min", 0),
        ("processes_max", 65),
        ("blocks", 1),
        ("warmup_calls", 0),
        ("target_half_width", 0),
        ("target_half_width", 1),
        ("build_limit_s", 0),
        ("run_limit_s", -1),
        ("run_limit_s", float("inf")),
        ("memory_limit_bytes", 0),
        ("process_limit", 0),
        ("file_limit_bytes", 0),
        ("threads", 0),
        ("threads", 10**9),
        ("error_ratio", 1),
        ("error_floor_eps", 0),
        ("lower_precision_share", 1),
        ("excess_limit", 0),
        ("excess_limit_us", 0),
        ("idle_limit_us", 0),
        ("interval_confidence", 0.5),
        ("forbid", ["no-such-label"]),
        ("timed", "perhaps"),
        ("blocks", "many"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().blocks = 3


def test_settings_go_through_json():
    settings = Settings.quick(forbid=frozenset({Label.TF32}), threads=2)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_quick_settings_are_never_less_strict_than_the_usual_ones():
    usual, quick = Settings(), Settings.quick()
    strictness = [
        "forbid",
        "error_ratio",
        "error_floor_eps",
        "lower_precision_share",
        "excess_limit",
        "excess_limit_us",
        "idle_limit_us",
        "strict_fp32",
        "tf32_products",
    ]
    assert [getattr(quick, name) for name in strictness] == [getattr(usual, name) for name in strictness]
    assert quick.timed
    assert not Settings.quick(timed=False).timed


def test_settings_of_before_tf32_products_are_the_same_text():
    assert "tf32_products" not in Settings().model_dump(mode="json")
    assert "tf32_products" not in Settings().model_dump_json()
    allowing = Settings(tf32_products=True)
    assert allowing.model_dump(mode="json") == Settings().model_dump(mode="json") | {"tf32_products": True}
    assert Settings.model_validate_json(allowing.model_dump_json()) == allowing


def test_settings_that_contradict_one_another_say_so():
    with pytest.raises(ConfigError, match="wanted strict_fp32 or tf32_products, found both"):
        build(Settings, {"strict_fp32": True, "tf32_products": True})
    with pytest.raises(ConfigError, match="processes_max is 2, less than processes_min, which is 9"):
        build(Settings, {"processes_min": 9, "processes_max": 2})
