"""Database addresses: whatever libpq reads becomes a URL that SQLAlchemy reads too."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import make_url

from embed_assets.errors import ConfigurationError
from embed_assets.urls import as_url, database_of, password_of

ADDRESSES = [
    "postgresql://u:p%40ss%2Fword@db.example:6543/app?sslmode=require&application_name=a%20b",
    "host=127.0.0.1 port=5433 user=u password='p@ss /wo:rd' dbname=app",
    "postgresql://u@[::1]:5432/app",
    "host=/var/run/postgresql dbname=app user=u",
    "postgresql:///app",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_url_says_what_the_address_said(address: str) -> None:
    assert conninfo_to_dict(as_url(address)) == {
        name: value for name, value in conninfo_to_dict(address).items() if value is not None
    }
    assert make_url(as_url(address)).database == "app"
    assert make_url(as_url(address)).password == password_of(address)
    assert database_of(as_url(address, database="other")) == "other"


def test_an_address_that_cannot_be_read_is_refused_without_quoting_it() -> None:
    with pytest.raises(ConfigurationError) as refused:
        as_url("postgresql://u:hunter2@host:port:1/x?y")
    assert "hunter2" not in str(refused.value)
    assert password_of("not = = an address") is None
