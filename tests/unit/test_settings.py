"""Settings: what the environment may say, what is refused by name, and what is raised to its floor."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.resources.assembly import find_corpus, load_registry
from embed_assets.resources.embedder import endpoint_key, make_embedder
from embed_assets.settings import FLOORS, Settings, load_settings

NUMBERS = {
    "EMBED_DIMENSIONS",
    "EMBED_BATCH_SIZE",
    "EMBED_CONCURRENCY",
    "EMBED_REQUEST_ITEMS",
    "EMBED_REQUESTS_PER_MINUTE",
    "EMBED_TOKENS_PER_MINUTE",
    "EMBED_CALL_TIMEOUT_SECONDS",
    "EMBED_ATTEMPT_TIMEOUT_SECONDS",
    "EMBED_LEASE_SECONDS",
    "EMBED_MAX_ATTEMPTS",
    "EMBED_WAVES_PER_RUN",
    "EMBED_RUN_SECONDS",
    "EMBED_DRAINS_IN_FLIGHT",
    "EMBED_SENSOR_WAIT_SECONDS",
    "EMBED_RECONCILE_SECONDS",
    "EMBED_RETENTION_DAYS",
    "EMBED_ROLLBACK_DAYS",
    "EMBED_SWITCH_MISSING_PERCENT",
    "EMBED_SWITCH_DEAD_PERCENT",
    "EMBED_SWITCH_RECALL_PERCENT",
    "EMBED_SWITCH_QUERIES",
    "EMBED_ACTIVE_DIMENSIONS",
    "EMBED_FRESH_SECONDS",
    "EMBED_SEARCH_FEED_SECONDS",
}
WORDS = {
    "EMBED_PROTOCOL": "soap",
    "EMBED_PREFIX_BY": "nobody",
    "EMBED_SWITCH": "never",
    "EMBED_ACTIVE_PROTOCOL": "soap",
    "EMBED_ACTIVE_PREFIX_BY": "nobody",
}
TEXTS = {
    *("DATABASE_URL", "EMBED_HOME", "EMBED_CORPORA"),
    *("EMBED_URL", "EMBED_QUERY_URL", "EMBED_API_KEY", "EMBED_MODEL", "EMBED_CA_BUNDLE", "EMBED_PROXY"),
    "EMBED_ALERT_WEBHOOK",
    *("EMBED_ACTIVE_URL", "EMBED_ACTIVE_QUERY_URL", "EMBED_ACTIVE_API_KEY", "EMBED_ACTIVE_MODEL"),
}


def variable(field: str) -> str:
    return "DATABASE_URL" if field == "database_url" else f"EMBED_{field.upper()}"


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> Settings:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def plain(value: Any) -> Any:
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def test_every_setting_is_held_by_one_of_the_tests_here():
    fields = {variable(field) for field in Settings.model_fields}
    assert fields == NUMBERS | set(WORDS) | TEXTS | {"EMBED_HEADERS"}
    assert {variable(field) for field in FLOORS} <= NUMBERS


def test_without_any_variable_the_documented_defaults_hold():
    settings = load_settings()
    assert (settings.batch_size, settings.max_attempts, settings.call_timeout_seconds) == (500, 3, 600)
    assert (settings.lease_seconds, settings.attempt_timeout_seconds, settings.reconcile_seconds) == (120, 60, 3600)
    assert (settings.waves_per_run, settings.run_seconds, settings.drains_in_flight) == (8, 60, 2)
    assert (settings.concurrency, settings.request_items, settings.sensor_wait_seconds) == (1, 32, 24)
    assert (settings.protocol, settings.prefix_by, settings.url, settings.database_url) == (
        "local",
        "client",
        None,
        None,
    )


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("value", ["many", "nan", "1e", "12 apples"])
def test_what_is_no_number_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    with pytest.raises(ConfigurationError, match=rf"settings that cannot be used: {name}: ") as caught:
        set_all(monkeypatch, **{name: value})
    assert "Correct or unset" in str(caught.value)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_each_number_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch, name: str):
    settings = set_all(monkeypatch, **{name: "77"})
    assert getattr(settings, name.removeprefix("EMBED_").lower()) == 77


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_each_text_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch, name: str):
    given = "postgresql://some/where" if name == "DATABASE_URL" else "some/where"
    settings = set_all(monkeypatch, **{name: given})
    field = "database_url" if name == "DATABASE_URL" else name.removeprefix("EMBED_").lower()
    assert str(plain(getattr(settings, field))) == given


NO_ADDRESSES = ["mysql://u:hunter2@h/d", "postgresql+psycopg://u:hunter2@h/d", "postgresql://u:hun%ter2@h/d", "hunter2"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_of_postgres_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, url: str):
    with pytest.raises(ConfigurationError, match=r"DATABASE_URL: .*no address of postgres") as caught:
        set_all(monkeypatch, DATABASE_URL=url)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_an_unknown_word_is_refused_with_the_words_that_are_known(monkeypatch: pytest.MonkeyPatch, name: str):
    with pytest.raises(ConfigurationError, match=rf"{name}: input should be '\w+'.* or '\w+'"):
        set_all(monkeypatch, **{name: WORDS[name]})


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigurationError, match=r"EMBED_PROTOCOL: .*; EMBED_BATCH_SIZE: "):
        set_all(monkeypatch, EMBED_PROTOCOL="soap", EMBED_BATCH_SIZE="x")


@pytest.mark.ids("A-61", "A-62")
@pytest.mark.parametrize("field", sorted(FLOORS))
def test_below_its_floor_a_setting_is_raised_to_it_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str
):
    with caplog.at_level(logging.WARNING, "embed_assets.settings"):
        settings = set_all(monkeypatch, **{variable(field): "-3"})
    assert getattr(settings, field) == FLOORS[field] == {"lease_seconds": 10, "switch_queries": 20}.get(field, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{variable(field)}=-3{'.0' if field == 'lease_seconds' else ''} is below its floor; {FLOORS[field]} is used"
    ]


@pytest.mark.ids("A-61")
@pytest.mark.parametrize("field", sorted(FLOORS))
def test_at_its_floor_a_setting_stands_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str
):
    settings = set_all(monkeypatch, **{variable(field): str(FLOORS[field])})
    assert getattr(settings, field) == FLOORS[field]
    assert not caplog.records


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_wave_budget_of_zero_or_less_means_none_and_stands(monkeypatch: pytest.MonkeyPatch, value: str):
    assert set_all(monkeypatch, EMBED_CALL_TIMEOUT_SECONDS=value).call_timeout_seconds == float(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EMBED_DIMENSIONS", "0"),
        ("EMBED_DIMENSIONS", "16001"),
        ("EMBED_ATTEMPT_TIMEOUT_SECONDS", "0"),
        ("EMBED_RUN_SECONDS", "-1"),
        ("EMBED_REQUESTS_PER_MINUTE", "0"),
        ("EMBED_TOKENS_PER_MINUTE", "-1"),
        ("EMBED_SENSOR_WAIT_SECONDS", "-1"),
        ("EMBED_RECONCILE_SECONDS", "0"),
        ("EMBED_LEASE_SECONDS", "inf"),
        ("EMBED_CALL_TIMEOUT_SECONDS", "inf"),
    ],
)
def test_a_number_that_can_mean_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    with pytest.raises(ConfigurationError, match=f"{name}: "):
        set_all(monkeypatch, **{name: value})


@pytest.mark.parametrize("name", sorted(TEXTS - {"EMBED_HOME", "EMBED_CORPORA"}))
def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch, name: str):
    settings = set_all(monkeypatch, **{name: ""})
    assert getattr(settings, "database_url" if name == "DATABASE_URL" else name[6:].lower()) is None


def test_headers_are_a_json_object(monkeypatch: pytest.MonkeyPatch):
    settings = set_all(monkeypatch, EMBED_HEADERS='{"X-Team": "search", "X-Key": "k"}')
    assert {name: plain(value) for name, value in settings.headers.items()} == {"X-Team": "search", "X-Key": "k"}
    assert set_all(monkeypatch, EMBED_HEADERS="").headers == {}


@pytest.mark.parametrize("value", ["X-Key: hush", '{"X-Key": 3}', '["hush"]', "{'X-Key': 'hush'}"])
def test_headers_of_another_form_are_refused_without_quoting_them(monkeypatch: pytest.MonkeyPatch, value: str):
    with pytest.raises(ConfigurationError, match=r"EMBED_HEADERS: .*must be a json object of texts") as caught:
        set_all(monkeypatch, EMBED_HEADERS=value)
    assert "hush" not in str(caught.value)


def test_secrets_show_in_no_form_of_the_settings_and_in_no_error(monkeypatch: pytest.MonkeyPatch):
    secrets = {
        "DATABASE_URL": "postgresql://u:hush1@h/d",
        "EMBED_API_KEY": "hush2",
        "EMBED_HEADERS": '{"X-Key": "hush3"}',
        "EMBED_PROXY": "http://u:hush4@proxy",
    }
    settings = set_all(monkeypatch, **secrets)
    assert "hush" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    monkeypatch.setenv("EMBED_BATCH_SIZE", "x")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert "hush" not in str(caught.value)


def test_settings_cannot_be_changed_once_they_are_loaded():
    with pytest.raises(ValueError, match="frozen"):
        load_settings().batch_size = 3  # type: ignore[misc]


def test_the_home_is_an_absolute_path_wherever_the_process_goes(monkeypatch: pytest.MonkeyPatch):
    assert set_all(monkeypatch, EMBED_HOME="~/vectors").home_path.is_absolute()
    assert load_settings(home="vectors").home_path.is_absolute()


def test_another_key_or_url_is_another_endpoint_and_neither_can_be_read_from_it():
    base = load_settings(url="http://a", api_key="hush")
    others = [load_settings(url="http://b", api_key="hush"), load_settings(url="http://a", api_key="hash")]
    others.append(load_settings(url="http://a", api_key="hush", protocol="tei"))
    keys = {endpoint_key(settings) for settings in [base, *others]}
    assert len(keys) == 4
    assert not [key for key in keys if "hush" in key or "http" in key]


def test_a_url_for_the_local_model_is_refused_as_a_forgotten_protocol():
    with pytest.raises(ConfigurationError, match="EMBED_URL is set but EMBED_PROTOCOL is 'local'"):
        make_embedder(load_settings(url="http://127.0.0.1:8090"))


@pytest.mark.ids("C-63")
@pytest.mark.parametrize("protocol", ["tei", "hf", "openai"])
def test_a_model_over_http_must_have_a_name(protocol: str):
    with pytest.raises(ConfigurationError, match="EMBED_MODEL is not set"):
        make_embedder(load_settings(protocol=protocol, url="http://127.0.0.1:8090"))


@pytest.mark.parametrize(
    ("corpora", "says"),
    [
        ("no.such.module:jobs", "names 'no.such.module:jobs', which cannot be imported"),
        ("embed_assets.corpora.jobs:nobody", "names 'embed_assets.corpora.jobs:nobody', which cannot be imported"),
        ("embed_assets.corpora.jobs", "Write it as package.module:name"),
        (":", "which cannot be imported"),
        ("embed_assets.corpora.jobs:TableCorpus", "which is no TableCorpus but type"),
        ("embed_assets.corpora.jobs:jobs, embed_assets.corpora.jobs:jobs", "'jobs' is declared twice"),
    ],
)
def test_a_corpus_that_cannot_be_loaded_is_named(corpora: str, says: str):
    with pytest.raises(DeclarationError, match=says):
        load_registry(load_settings(corpora=corpora))


@pytest.mark.ids("C-63")
def test_no_corpus_at_all_is_a_clear_error():
    with pytest.raises(ConfigurationError, match="EMBED_CORPORA names no corpus"):
        find_corpus(load_settings(corpora=" , "), "jobs")


def test_an_unknown_kind_is_answered_with_the_known_ones():
    with pytest.raises(DeclarationError, match=r"Unknown kind 'job'\. Declared are: jobs"):
        find_corpus(load_settings(), "job")
