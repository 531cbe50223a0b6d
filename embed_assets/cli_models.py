"""Commands for the models of a kind: look at them, build and judge, switch, roll back, give up, allow again.

They open the kind without an embedder, so that they work whatever model the settings name. What does not belong
here: the doing (`resources/model_life.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from embed_assets import console
from embed_assets.cli_shared import AsJson, KindName, bound_kind, until_signalled
from embed_assets.resources.model_life import ModelLife
from embed_assets.settings import load_settings
from embed_assets.stop import Stop

models_app = typer.Typer()

Force = Annotated[bool, typer.Option("--force", help="Whatever the gates say.")]


@contextmanager
def _life(kind: str) -> Iterator[tuple[ModelLife, Stop]]:
    with bound_kind(kind) as (postgres, bound), until_signalled(postgres) as stop:
        yield ModelLife(postgres, bound, load_settings()), stop


@models_app.command()
def models(kind: KindName, as_json: AsJson = False) -> None:
    """Every model of a kind: which one search reads, which one is built, how far it is and what it waits for."""
    with _life(kind) as (life, _):
        found = [(model, life.index_of(model).state()) for model in life.models()]
    if as_json:
        rows = [asdict(model) | {"state": model.state, "index": asdict(index)} for model, index in found]
        typer.echo(json.dumps(rows, default=str, ensure_ascii=False))
    else:
        console.out.print(console.models_table(found))


@models_app.command()
def advance(kind: KindName) -> None:
    """Build the indexes that can be built, judge the target, and switch to it unless EMBED_SWITCH is operator."""
    with _life(kind) as (life, stop), console.progress(f"index {kind}") as (bar, task):
        bar.update(task, total=100)
        done = life.advance(stop, lambda part: bar.update(task, completed=100 * part))
    console.out.print("\n".join(done) or "nothing to do", markup=False)


@models_app.command()
def switch(kind: KindName, force: Force = False) -> None:
    """Let search read the model that was built. It can be taken back with rollback for EMBED_ROLLBACK_DAYS."""
    with _life(kind) as (life, _):
        console.out.print(f"search reads {life.switch(force=force).identity} now", markup=False)


@models_app.command()
def rollback(kind: KindName) -> None:
    """Let search read the model of before again, at once."""
    with _life(kind) as (life, _):
        identity = life.rollback().identity
    console.out.print(f"search reads {identity} now", markup=False)
    console.out.print("set EMBED_PROTOCOL, EMBED_URL and EMBED_MODEL back to it, or it is frozen")


@models_app.command()
def abandon(kind: KindName) -> None:
    """Give up the model that is being built; search goes on as it is."""
    with _life(kind) as (life, _):
        console.out.print(f"{life.abandon().identity} is given up", markup=False)


@models_app.command()
def admit(kind: KindName, identity: Annotated[str, typer.Argument(help="As 'models' shows it.")]) -> None:
    """Allow a retired model again: the next process that is set to it builds it."""
    with _life(kind) as (life, _):
        life.admit(identity)
    console.out.print(f"{identity} may be built again", markup=False)
