"""Commands for whoever looks for rows.

What does not belong here: searching (`search.py`), what is printed (`console`).
"""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import errors, sql

from embed_assets import console
from embed_assets.cli_shared import AsJson, KindName, bound_kind, pairs, until_signalled
from embed_assets.errors import ConfigurationError, RowRejected
from embed_assets.resources.assembly import find_corpus
from embed_assets.resources.similar_store import SimilarStore
from embed_assets.search import open_search
from embed_assets.settings import load_settings

find = typer.Typer()

Where = Annotated[list[str] | None, typer.Option("--where", help="column=value of the table; may be given often.")]


@find.command()
def search(
    kind: KindName,
    text: Annotated[str, typer.Argument(help="What to look for, in any language.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many rows.")] = 10,
    where: Where = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Let the words count too, not only the meaning.")] = False,
    as_json: AsJson = False,
) -> None:
    """The nearest rows, each by its best chunk."""
    condition, values = _condition(pairs("--where", where))
    settings = load_settings()
    with open_search(settings, find_corpus(settings, kind)) as client:
        try:
            answer = client.search(text, k=k, where=condition, values=values, hybrid=hybrid)
        except errors.UndefinedColumn as error:
            raise ConfigurationError(f"--where: {error.diag.message_primary}. Name a column of the table.") from None
        except RowRejected:
            if not where:
                raise
            raise ConfigurationError("--where: a value is none of its column's type. Correct it.") from None
    if as_json:
        typer.echo(console.answer_json(answer))
    else:
        console.print_answer(answer)


@find.command()
def similar(
    kind: KindName,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The key of a row, as text.")],
    k: Annotated[int | None, typer.Option("-k", min=1, help="How many; all that are kept, unless given.")] = None,
    as_json: AsJson = False,
) -> None:
    """The precomputed neighbours of a row that may show now."""
    with bound_kind(kind) as (postgres, bound):
        rows = SimilarStore(postgres, bound).shown(id_, k=k)
    if as_json:
        typer.echo(console.similar_json(rows))
    else:
        console.print_similar(rows)


@find.command()
def recompute(
    kind: KindName,
    everything: Annotated[bool, typer.Option("--all", help="Every list, not only the stale ones.")] = False,
) -> None:
    """Compute the precomputed neighbours that are stale, until none is."""
    with bound_kind(kind) as (postgres, bound), until_signalled(postgres) as stop:
        store = SimilarStore(postgres, bound)
        while everything or store.waiting():
            done = store.refresh(everything=everything, stop=stop)
            console.out.print(console.refreshed_line(done), markup=False)
            everything = False
            if done.postponed or done.idle:
                return
        console.out.print("nothing is stale")


def _condition(wanted: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Columns as identifiers, values as parameters."""
    names = {column: f"where_{number}" for number, column in enumerate(wanted)}
    parts = [f"self.{_quoted(column)} = %({name})s" for column, name in names.items()]
    return " AND ".join(parts) or "TRUE", {name: wanted[column] for column, name in names.items()}


def _quoted(column: str) -> str:
    return sql.Identifier(column.replace("%", "%%")).as_string(None)
