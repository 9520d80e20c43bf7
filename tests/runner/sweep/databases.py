"""A stand-in for a database on another machine: its URLs have a password, and it may be away."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.pool import NullPool

NAME, PASSWORD = "standin", "s3cret"


class StandIn(SQLiteDialect_pysqlite):
    """Keeps what it is told in a file of SQLite, named by the URL's database."""

    driver = "pysqlite"
    supports_statement_cache = True
    is_away = False

    @classmethod
    def get_pool_class(cls, url: Any) -> Any:
        return NullPool  # each use connects

    def create_connect_args(self, url: Any) -> Any:
        assert url.password == PASSWORD
        return [url.database], {"check_same_thread": False}

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        if StandIn.is_away:
            raise sqlite3.OperationalError("could not connect to server: Connection refused")
        return super().connect(*args, **kwargs)


def url_in(folder: Path) -> str:
    """Return the URL of a database whose file lies in a folder."""
    registry.register(NAME, __name__, StandIn.__name__)
    return f"{NAME}://user:{PASSWORD}@host/{folder / 'study.db'}"
