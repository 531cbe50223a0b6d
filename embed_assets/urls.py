"""Database addresses in the one form that psycopg, psycopg2 and SQLAlchemy all read."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from embed_assets.errors import ConfigurationError


def as_url(address: str, *, database: str | None = None) -> str:
    """A URL or a keyword string (`host=… dbname=…`) as a URL, of another database if one is given.

    Raises ConfigurationError, without quoting what it could not read.
    """
    parts = _parts(address)
    if database:
        parts["dbname"] = database
    user, password = quote(parts.pop("user", ""), safe=""), quote(parts.pop("password", ""), safe="")
    account = f"{user}:{password}@" if password else f"{user}@" if user else ""
    host, port = parts.pop("host", ""), parts.pop("port", "")
    name = quote(parts.pop("dbname", ""), safe="")
    if "/" in host or "," in host or "," in port:  # a socket's folder, or several servers
        parts |= {"host": host, "port": port}
        host = port = ""
    where = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    more = urlencode({key: value for key, value in parts.items() if value}, quote_via=quote)
    return f"postgresql://{account}{where}/{name}" + (f"?{more}" if more else "")


def database_of(address: str) -> str:
    """The database's name; the user's where none is given, as libpq has it."""
    parts = _parts(address)
    return parts.get("dbname") or parts.get("user") or "postgres"


def password_of(address: str) -> str | None:
    """The password it holds, decoded; None without one, or when it cannot be read."""
    try:
        return _parts(address).get("password")
    except ConfigurationError:
        return None


def _parts(address: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(address).items() if value is not None}
    except ProgrammingError:
        raise ConfigurationError(
            "DATABASE_URL cannot be read. Write it as postgresql://user:password@host:port/database, with special "
            "characters of the password percent-encoded."
        ) from None
