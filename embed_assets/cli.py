"""The command line: the same stages as the assets, for a shell. Errors are one paragraph that says what to do.

What does not belong here: any decision about rows (`pipeline`), what is printed (`console`).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from embed_assets import console
from embed_assets.cli_drain import drain
from embed_assets.cli_models import models_app
from embed_assets.cli_operate import operate
from embed_assets.cli_search import find
from embed_assets.cli_shared import FAILED, AsJson, KindName, opened_kind, pairs
from embed_assets.errors import Cancelled, ClassifiedError, EmbedAssetsError
from embed_assets.fake_server.cli import fake_server
from embed_assets.resources.assembly import database_url, find_corpus
from embed_assets.resources.operator import Operator
from embed_assets.resources.verdict import facts_of, verdict
from embed_assets.settings import load_settings

logger = logging.getLogger("embed_assets")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(find)
app.add_typer(operate)
app.command()(drain)
app.command("fake-server")(fake_server)
app.add_typer(models_app)

CONFIGURATION, INTERRUPTED = 2, 130


def main() -> None:
    """Entry point of `embed-assets`. Exit code 0 done, 1 something failed, 2 wrong surroundings, 130 interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        app()
    except Cancelled:
        console.explain("Interrupted: what was under way is released, nothing is charged.")
        sys.exit(INTERRUPTED)
    except ClassifiedError as error:
        console.explain(str(error))
        sys.exit(FAILED)
    except EmbedAssetsError as error:
        console.explain(str(error))
        sys.exit(CONFIGURATION)


@app.command()
def load(
    kind: KindName,
    file: Annotated[Path, typer.Argument(help="One JSON object a line, each with an external_id.")],
    map_: Annotated[list[str] | None, typer.Option("--map", help="column=field; dots descend.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="column=value for every row.")] = None,
    close_missing: Annotated[bool, typer.Option(help="Close the rows that the file does not hold.")] = False,
    strict: Annotated[bool, typer.Option(help="Refuse the whole file when one line is bad.")] = False,
) -> None:
    """Upsert a JSON Lines file into the kind's table by external_id."""
    import psycopg

    from embed_assets.load import create_jobs_table, load_file

    settings = load_settings()
    corpus = find_corpus(settings, kind)
    mapping, constants = pairs("--map", map_), pairs("--set", set_)
    with psycopg.connect(database_url(settings)) as connection, console.progress(f"load {kind}") as (bar, task):
        if corpus.table == "jobs":
            create_jobs_table(connection)
        report = load_file(
            connection,
            corpus.table,
            file,
            mapping=mapping,
            constants=constants,
            close_missing=close_missing,
            strict=strict,
            progress=lambda lines: bar.advance(task, lines),
        )
    console.print_load(report)


@app.command()
def status(kind: KindName, as_json: AsJson = False) -> None:
    """Count every source row once, by what its vectors say of it."""
    with opened_kind(kind) as opened:
        report, backlog = opened.outbox.status(opened.identity), opened.outbox.backlog()
        latency = Operator(opened.postgres, kind).latency()
        standing = opened.life.standing(opened.outbox.models)
        stamped = sum(model.stamped for model in opened.life.models() if model.model_id == opened.model_id)
    found = verdict(facts_of(report.counts, stamped=stamped, frozen_since=standing.frozen_since))
    if as_json:
        typer.echo(console.status_json(report, backlog, latency, standing, found))
    else:
        console.out.print(console.verdict_line(found), markup=False)
        console.out.print(console.status_table(report, backlog))
        if line := console.standing_line(standing):
            console.out.print(line, markup=False)
        console.out.print(console.latency_line(latency))


@app.command()
def migrate() -> None:
    """Bring the database's schema embed_assets to the newest migration."""
    from embed_assets.migrate import migrate as apply

    applied = apply(database_url(load_settings()))
    console.out.print("\n".join(applied) if applied else "nothing to migrate")


@app.command()
def url() -> None:
    """Print the database's URL; the embedded server is started if it is not up."""
    typer.echo(database_url(load_settings()))


@app.command()
def down() -> None:
    """Stop the embedded server."""
    from embed_assets import server

    stopped = server.stop(load_settings().home_path)
    console.out.print("stopped" if stopped else "was not running")


@app.command()
def env() -> None:
    """Print the environment in which a plain `dagster dev` works: eval "$(embed-assets env)"."""
    import shlex

    from embed_assets.dev import dev_environment

    for name, value in dev_environment(load_settings()).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def dev(
    host: Annotated[str, typer.Option(help="Loopback unless you put authentication in front.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 3000,
) -> None:
    """Start Postgres if needed, and Dagster's UI and daemon; Ctrl-C stops them."""
    from embed_assets.dev import run_dev

    raise typer.Exit(run_dev(load_settings(), host=host, port=port))
