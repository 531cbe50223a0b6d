"""docs/reference.md names everything that a reader may meet: tables, views, functions, assets, jobs, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from postgres.support import Db, rows

from embed_assets.cli import app
from embed_assets.corpora.jobs import jobs
from embed_assets.defs.build import build_definitions
from embed_assets.resources.assembly import Kind
from embed_assets.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference.md").read_text(encoding="utf-8")
NAMED = {re.split(r"[( ]", name)[0] for name in re.findall(r"`([^`]+)`", PAGE)}
INTERNAL = r"_m\d+$|^tell_search_"  # partitions, trigger functions


def said(name: str) -> bool:
    return name in NAMED or re.sub(r"^jobs(?=[_/])|(?<=_)jobs$", "KIND", name) in NAMED


def unsaid(names: list[str]) -> list[str]:
    return sorted(name for name in names if not said(name) and not re.search(INTERNAL, name))


def test_every_table_view_and_function_is_named(kind: Kind, db: Db) -> None:
    relations = rows(
        db,
        "SELECT relname FROM pg_class WHERE relnamespace = 'embed_assets'::regnamespace AND relkind IN ('r', 'p', 'v')",
    )
    functions = rows(db, "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'embed_assets'::regnamespace")
    assert len(relations) > 20
    assert unsaid(relations) == []
    assert unsaid(functions) == []


def test_every_asset_job_sensor_and_schedule_is_named() -> None:
    defs = build_definitions([jobs], settings=Settings(DATABASE_URL="postgresql://nowhere"))
    assets = [key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()]
    named = [one.name for found in (defs.jobs, defs.sensors, defs.schedules) for one in found or []]
    assert unsaid([*assets, *named]) == []


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_every_command_is_named(command: str) -> None:
    assert said(command)
