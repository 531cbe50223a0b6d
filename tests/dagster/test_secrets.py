"""No key, password or token is ever shown: not in Dagster's event log, metadata or config, not in a table, a log line,
an error or a repr, whatever the endpoint answers."""

from __future__ import annotations

import logging
import traceback
from urllib.parse import urlsplit

import pytest
from dagster import AssetKey

from embed_assets.defs.build import build_definitions
from embed_assets.errors import ClassifiedError
from embed_assets.fake_server import FakeServer
from embed_assets.resources.assembly import open_kind
from embed_assets.settings import Settings
from embed_assets.stop import Stop
from tests.dagster.project import POSTS, QUIET, Project

TABLES = ("claimed_waves", "semantic_outbox", "semantic_outbox_log", "embedding_endpoints", "embedding_models")
KEY = "hUsH-k3y-"
ANSWERS = {
    "a good answer": None,
    "a refusal that quotes the key": 401,
    "an answer that is no answer": "unknown_shape",
    "nothing at the address": 404,
    "a server that is overloaded": (429, {"retry-after": "3000"}, {}),
    "a text that is refused": 400,
}


@pytest.fixture
def key() -> str:
    return KEY


def secret_settings(project: Project, server: FakeServer, key: str) -> Settings:
    address = urlsplit(server.openai_url)
    return Settings(
        DATABASE_URL=project.url,
        protocol="openai",
        url=f"http://user:hUsH-password@{address.netloc}{address.path}?token=hUsH-token",
        query_url="http://user:hUsH-password@127.0.0.1:9/?token=hUsH-token",
        api_key=key,
        headers={"X-Key": "hUsH-header"},
        proxy=None,
        model="stub/model",
        dimensions=8,
    )


def everything_shown(project: Project, run_id: str) -> str:
    """What Dagster keeps and shows of a run and its assets, and what our tables hold."""
    records = [str(record) for record in project.instance.all_logs(run_id)]
    run = str(project.instance.get_run_by_id(run_id))
    kept = project.instance.fetch_materializations(AssetKey(["posts", "chunk_embeddings"]), limit=10).records
    rows = [str(project.db.execute(f"SELECT * FROM embed_assets.{table}".encode()).fetchall()) for table in TABLES]
    return "\n".join([*records, run, *map(str, kept), *rows])


@pytest.mark.ids("E20")
@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_the_endpoint_answers_nothing_that_is_kept_holds_a_secret(
    project: Project, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = KEY * 300
    project.put("one", "two")
    with FakeServer(speaks="openai", api_key=None if answer.startswith("a good") else "other") as server:
        if not answer.startswith("a refusal"):
            server.api_key = None
            server.always = ANSWERS[answer]
        settings = secret_settings(project, server, key)
        definitions = build_definitions([POSTS], settings=settings)
        job = definitions.resolve_job_def("posts_drain")
        with caplog.at_level(logging.DEBUG, "embed_assets"):
            result = job.execute_in_process(raise_on_error=False, run_config=QUIET, instance=project.instance)
        sent = [request.headers for request in server.requests]
    assert sent
    assert sent[0]["authorization"] == f"Bearer {key}", "the key did not even go where it belongs"
    assert sent[0]["x-key"] == "hUsH-header"
    shown = everything_shown(project, result.run_id) + caplog.text
    assert "hUsH" not in shown
    assert "claimed_waves" in shown


@pytest.mark.ids("E20")
def test_no_repr_and_no_traceback_holds_a_secret(project: Project, key: str) -> None:
    with FakeServer(speaks="openai", api_key="other") as server:
        settings = secret_settings(project, server, key)
        kind = open_kind(settings, POSTS)
        embedder = kind.models[0].embedder
        try:
            list(embedder.embed(["text"], stop=Stop()))
        except ClassifiedError as error:
            told = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
        shown = [repr(settings), str(settings), repr(kind), repr(embedder), repr(kind.models), repr(kind.ports)]
        kind.close()
    assert "check EMBED_API_KEY" in told
    assert "hUsH" not in told + "".join(shown)
    password = urlsplit(project.url).password
    assert password is None or password not in "".join(shown)


def test_the_config_that_the_ui_shows_has_no_field_for_a_secret(project: Project, key: str) -> None:
    with FakeServer() as server:
        settings = secret_settings(project, server, key)
        repository = build_definitions([POSTS], settings=settings).get_repository_def()
    shown = [
        f"{name} {resource.config_schema.as_field()} {resource.config_schema.default_value}"
        for name, resource in repository.get_top_level_resources().items()
        if resource.config_schema.default_provided
    ]
    assert shown
    assert "hUsH" not in str(shown)
