"""What a component may be called and which options it takes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainers.rewards import RewardConfig, from_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("exact_match", "text"),
        ("numeric_match", "text"),
        ("math_verify", "math_verify"),
        (r"regex:^\s*Answer: \S", "regex"),
        ("regex:", "regex"),
        ("format:<a>.*</a>", "format"),
        ("package.module:function", "function"),
        ("http://127.0.0.1:8000/score", "http"),
        ("http://[::1]:8000/", "http"),
        ("https://rewards.example.org", "http"),
    ],
)
def test_names(name, kind):
    assert from_name(name).kind == kind
    assert from_name(name) == RewardConfig(name=name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact_mach", "reward 'exact_mach' is unknown; did you mean exact_match"),
        ("numeric", "did you mean numeric_match"),
        ("regx:^a", "did you mean regex"),
        ("format", "allowed: exact_match"),
        (
            "zzz",
            "unknown; allowed: exact_match, numeric_match, math_verify, length, regex:PATTERN, format:PATTERN, module:function",
        ),
        ("", "reward '' is unknown"),
        (":f", "unknown"),
        ("m:", "unknown"),
        ("my-module:f", "unknown"),
        ("ftp://host/score", "unknown"),
        ("regex:(", r"regex:\(: not a regular expression"),
        ("format:(", r"format:\(: not a regular expression"),
        ("http:host", "allowed: http://HOST:PORT/PATH"),
        ("http://", "allowed: http://HOST:PORT/PATH"),
        ("http://host:port/", "allowed: http://HOST:PORT/PATH"),
        ("http://host/a b", "allowed: http://HOST:PORT/PATH"),
        ("http://host/a\r\nX: 1", "allowed: http://HOST:PORT/PATH"),
        ("https://me:secret@host/", "a user or password in a URL would be logged"),
        ("length", "length needs max_tokens"),
    ],
)
def test_other_names_are_refused(name, expected):
    with pytest.raises(ValueError, match=expected) as error:
        from_name(name)
    assert len(str(error.value).splitlines()) == 1
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "exact_match", "timeout_s": 1.0}, "timeout_s does not belong to it, only to: math_verify, function, http"),
        (
            {"name": "exact_match", "batch_timeout_s": 1.0},
            "batch_timeout_s does not belong to it, only to: math_verify, function, http",
        ),
        ({"name": "math_verify", "workers": 2}, "workers does not belong to it, only to: function"),
        ({"name": "m:f", "workers": 0}, "greater than or equal to 1"),
        ({"name": "m:f", "timeout_s": 301.0}, "timeout_s=301; allowed: up to batch_timeout_s=300"),
        ({"name": "m:f", "timeout_s": 3.0, "batch_timeout_s": 2.0}, "timeout_s=3; allowed: up to batch_timeout_s=2"),
        ({"name": "m:f", "retries": 0}, "retries does not belong to it, only to: http"),
        ({"name": "m:f", "batch_size": 2}, "batch_size does not belong"),
        ({"name": "http://host", "max_tokens": 2}, "max_tokens does not belong to it, only to: length"),
        ({"name": "regex:a", "buffer": 2}, "buffer does not belong"),
        ({"name": "length", "max_tokens": 4}, "length needs max_tokens .* and buffer"),
        ({"name": "length", "buffer": 4}, "length needs max_tokens"),
        ({"name": "length", "max_tokens": 4, "buffer": 5}, "buffer=5; allowed: 1 to max_tokens=4"),
        ({"name": "length", "max_tokens": 4, "buffer": 0}, "greater than or equal to 1"),
        ({"name": "m:f", "timeout_s": 0.0}, "greater than 0"),
        ({"name": "m:f", "timeout_s": float("inf")}, "finite"),
        ({"name": "exact_match", "weight": float("nan")}, "finite"),
        ({"name": "exact_match", "wait": 1.0}, "Extra inputs"),
    ],
)
def test_options_of_another_kind_are_refused(options, expected):
    with pytest.raises(ValidationError, match=expected):
        RewardConfig(**options)


def test_a_config_survives_being_written_and_read():
    for config in (
        RewardConfig(name="exact_match", weight=2, default=-1),
        RewardConfig(name="length", max_tokens=8, buffer=4),
        RewardConfig(name="http://host/x", timeout_s=1, retries=0, batch_size=3),
    ):
        assert RewardConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_url_is_called_without_its_query():
    assert from_name("http://host:8000/score?key=secret").label == "http://host:8000/score"
    assert from_name("regex:a?b").label == "regex:a?b"
