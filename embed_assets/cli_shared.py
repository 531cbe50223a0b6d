"""What the commands share: their common arguments, and a kind that is open for as long as a command runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from embed_assets.errors import EmbedAssetsError
from embed_assets.resources.assembly import Kind, as_sent, database_url, find_corpus, open_kind
from embed_assets.resources.declaration import BoundCorpus, bind
from embed_assets.resources.postgres import Postgres
from embed_assets.settings import load_settings
from embed_assets.stop import Stop

KindName = Annotated[str, typer.Argument(metavar="KIND", help="A declared kind, for example jobs.")]
FAILED = 1  # the exit code when something failed

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@contextmanager
def opened_kind(kind: str, *, embeds: bool = False) -> Iterator[Kind]:
    """The kind, assembled from the environment's settings; see `open_kind`. Raises ConfigurationError."""
    settings = load_settings()
    opened = open_kind(settings, find_corpus(settings, kind), embeds=embeds)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def bound_kind(kind: str) -> Iterator[tuple[Postgres, BoundCorpus]]:
    """The kind's database and declaration alone, for what needs no embedder. Raises ConfigurationError."""
    settings = load_settings()
    postgres = Postgres(database_url(settings))
    try:
        yield postgres, bind(postgres, as_sent(find_corpus(settings, kind), settings))
    finally:
        postgres.close()


@contextmanager
def until_signalled(postgres: Postgres) -> Iterator[Stop]:
    """SIGINT and SIGTERM end the work within seconds: the scope is cancelled, and so is a statement that runs."""
    stop = Stop()

    def end(*_: object) -> None:
        stop.cancel()
        threading.Thread(target=postgres.cancel, daemon=True).start()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pairs(option: str, values: list[str] | None) -> dict[str, str]:
    """`column=value` arguments by column. Raises EmbedAssetsError for one that is none."""
    found = {}
    for value in values or []:
        column, equals, rest = value.partition("=")
        if not equals or not column:
            raise EmbedAssetsError(f"{option} '{value}' is not column=value. Write it like {option} title=job.name.")
        found[column] = rest
    return found
