"""The environment: what a person may set there, and what is refused."""

import pytest

from tilewright import cli
from tilewright.errors import InvalidArgument
from tilewright.settings import Settings, settings

UNSET = {
    "enabled": True, "check_indices": False, "trusts_indices": False, "nondeterministic": False,
    "compile_timeout_s": 120, "workspace_limit_bytes": 2**29,
}  # fmt: skip
VARIABLES = (
    "TILEWRIGHT_ENABLED", "TILEWRIGHT_CHECK_INDICES", "TILEWRIGHT_NONDETERMINISTIC",
    "TILEWRIGHT_COMPILE_TIMEOUT", "TILEWRIGHT_WORKSPACE_BYTES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def none_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def changed(found: Settings) -> dict[str, object]:
    """Of what UNSET names, all that is otherwise."""
    return {name: getattr(found, name) for name in UNSET if getattr(found, name) != UNSET[name]}


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_value_is_as_none(name, monkeypatch):
    monkeypatch.setenv(name, "")
    assert changed(settings()) == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TILEWRIGHT_ENABLED", "0", {"enabled": False}),
        ("TILEWRIGHT_ENABLED", "1", {}),
        ("TILEWRIGHT_CHECK_INDICES", "1", {"check_indices": True}),
        ("TILEWRIGHT_CHECK_INDICES", "0", {"trusts_indices": True}),
        ("TILEWRIGHT_NONDETERMINISTIC", "1", {"nondeterministic": True}),
        ("TILEWRIGHT_NONDETERMINISTIC", "0", {}),
        ("TILEWRIGHT_COMPILE_TIMEOUT", "0.5", {"compile_timeout_s": 0.5}),
        ("TILEWRIGHT_WORKSPACE_BYTES", "0", {"workspace_limit_bytes": 0}),
        ("TILEWRIGHT_WORKSPACE_BYTES", "4096", {"workspace_limit_bytes": 4096}),
    ],
)
def test_a_value_changes_what_it_is_for_alone(name, text, expected, monkeypatch):
    monkeypatch.setenv(name, text)
    assert changed(settings()) == expected


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("TILEWRIGHT_ENABLED", "false", "0 or 1"),
        ("TILEWRIGHT_CHECK_INDICES", "yes", "0 or 1"),
        ("TILEWRIGHT_NONDETERMINISTIC", "true", "0 or 1"),
        ("TILEWRIGHT_COMPILE_TIMEOUT", "2m", "a number of seconds"),
        ("TILEWRIGHT_COMPILE_TIMEOUT", "-1", "a number of seconds"),
        ("TILEWRIGHT_COMPILE_TIMEOUT", "nan", "a number of seconds"),
        ("TILEWRIGHT_WORKSPACE_BYTES", "1GB", "a number of bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name, text, wanted, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidArgument, match=f"{name}={text} should be {wanted}"):
        settings()


def test_the_command_line_ends_with_the_message_alone(monkeypatch, capsys):
    monkeypatch.setenv("TILEWRIGHT_WORKSPACE_BYTES", "1GB")
    assert cli.main(["explain", "softmax(x=f32[8,8])", "--no-measure"]) == 2
    message = "InvalidArgument: TILEWRIGHT_WORKSPACE_BYTES=1GB should be a number of bytes"
    assert capsys.readouterr().err.startswith(message)
