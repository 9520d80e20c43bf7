"""Passwords in URLs are hidden (R8)."""

from __future__ import annotations

import pytest

from accel.machine.errors import ConfigError
from accel.machine.passwords import shown, without_passwords


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("postgresql://user:pw@host:5432/db", "postgresql://user:***@host:5432/db"),
        ("mysql+pymysql://:pw@host", "mysql+pymysql://:***@host"),
        ("a=x://u:p/w@h b='y://u:p@w@h/d'", "a=x://u:***@h b='y://u:***@h/d'"),
        ("postgresql:///db?host=h&password=pw&x=1", "postgresql:///db?host=h&password=***&x=1"),
        ("postgresql://user@corp:p'w@h/d", "postgresql://user@corp:p'w@h/d"),
        ("postgresql://user@corp:12@h/d", "postgresql://user@corp:***@h/d"),
        ("postgresql://user:123456/7@h/d", "postgresql://user:***@h/d"),
        ("http://host:80/metrics?user=me@b.org", "http://host:80/metrics?user=me@b.org"),
        ("https://proxy:3128,https://user@host", "https://proxy:3128,https://user@host"),
        ("https://host:80/user", "https://host:80/user"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("https://user@host/a", "https://user@host/a"),
    ],
)
def test_passwords_of_urls_are_hidden(text: str, hidden: str) -> None:
    assert without_passwords(text) == hidden
    assert shown([text, "b"]) == [hidden, "b"]


def test_errors_show_no_password() -> None:
    error = ConfigError.of("storage=x://u:pw@h", "x://u:pw@h is away", "Mend x://u:pw@h.")
    assert str(error) == "storage=x://u:***@h: x://u:***@h is away. Mend x://u:***@h."
