"""What all processes know of an endpoint: it rests for all of them, keeps one pace, and its limits are learned once."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from postgres.support import Db, background, until_true, value

from embed_assets.embedding import Embedded, Embedder
from embed_assets.embedding.batches import Limits
from embed_assets.errors import EndpointTrouble, ErrorClass
from embed_assets.fake_server import FakeServer
from embed_assets.resources import embedder as resource
from embed_assets.resources.embedder import Endpoint, make_embedder
from embed_assets.resources.postgres import Postgres
from embed_assets.settings import Settings
from embed_assets.stop import Stop

Process = Callable[..., tuple[Endpoint, Embedder]]
TEXTS = [f"text {n}" for n in range(8)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def process(server: FakeServer, database_url: str) -> Iterator[Process]:
    """What a process of its own has of the server's endpoint: the shared state, and an embedder that keeps to it."""
    made: list[tuple[Postgres, Embedder]] = []

    def make(**settings: Any) -> tuple[Endpoint, Embedder]:
        given = {"protocol": "tei", "url": server.url, "model": "stub/model", "dimensions": 8, **settings}
        known = Settings(**given)
        postgres = Postgres(database_url)
        endpoint = Endpoint(postgres, known)
        embedder = make_embedder(known, shared=endpoint)
        made.append((postgres, embedder))
        return endpoint, embedder

    yield make
    for postgres, embedder in made:
        embedder.close()
        postgres.close()


def embed(embedder: Embedder, texts: list[str] = TEXTS, *, seconds: float = 20) -> int:
    """How many vectors came."""
    return sum(len(r.positions) for r in embedder.embed(texts, stop=Stop(seconds=seconds)) if isinstance(r, Embedded))


def trouble(error_class: ErrorClass, **more: Any) -> EndpointTrouble:
    return EndpointTrouble("not now", error_class=error_class, **more)


# --- rests


@pytest.mark.ids("E12")
def test_what_one_process_was_told_the_others_keep_to_without_asking(server: FakeServer, process: Process) -> None:
    server.then((429, {"retry-after": "2"}, {}))
    (_, first), (endpoint, second) = process(), process()
    with background(lambda: embed(first)) as done:
        until_true(lambda: endpoint.resting() is not None, "nobody was told")
        assert embed(second) == 8
        assert done.result() == 8
    told, *later = server.requests
    assert len(later) == 2
    assert min(request.at for request in later) - told.at >= 2


@pytest.mark.ids("E12")
def test_a_rest_begins_with_the_first_refusal_and_not_when_the_attempts_are_used_up(
    server: FakeServer, process: Process
) -> None:
    server.always = (429, {"retry-after": "30"}, {})
    endpoint, embedder = process()
    with pytest.raises(Exception, match="budget"):
        embed(embedder, seconds=1)
    rest = endpoint.resting()
    assert rest is not None
    assert (rest.state, round(rest.seconds, -1)) == ("cooling", 30)
    assert len(server.requests) == 1


def test_a_rest_longer_than_a_request_waits_for_is_told_at_once_and_made_no_longer(
    server: FakeServer, process: Process
) -> None:
    endpoint, embedder = process()
    endpoint.rest(trouble(ErrorClass.UNAVAILABLE), seconds=300)
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder)
    endpoint.rest(raised.value)
    rest = endpoint.resting()
    assert rest is not None
    assert 290 < rest.seconds < 300
    assert rest.reason == "unavailable: not now"
    assert server.requests == []


@pytest.mark.ids("E12")
def test_an_answer_to_an_earlier_request_does_not_end_a_rest_that_was_asked_for_since(process: Process) -> None:
    endpoint, _ = process()
    endpoint.rest(trouble(ErrorClass.RATE_LIMITED), seconds=60)
    endpoint.works(seconds=5)
    assert endpoint.resting() is not None
    endpoint.works(seconds=0)
    assert endpoint.resting() is None


@pytest.mark.ids("E14")
def test_a_refused_endpoint_is_left_alone_for_ten_minutes_and_says_what_to_do(
    server: FakeServer, process: Process, db: Db
) -> None:
    server.api_key = "right"
    endpoint, embedder = process(api_key="wrong")
    with pytest.raises(EndpointTrouble, match="check EMBED_API_KEY") as raised:
        embed(embedder)
    endpoint.rest(raised.value)
    rest = endpoint.resting()
    assert rest is not None
    assert (rest.state, round(rest.seconds / 60)) == ("refused", 10)
    assert "EMBED_API_KEY" in rest.reason
    assert process(api_key="right")[0].resting() is None, "another key is another endpoint"
    assert process(api_key="wrong", url=server.hf_url)[0].resting() is None, "so is another address"
    db.execute("UPDATE embed_assets.embedding_endpoints SET until = clock_timestamp()")
    assert endpoint.resting() is None, "then it is asked again"
    server.api_key = "wrong"
    assert embed(embedder) == 8


def test_an_operator_who_drains_has_a_refused_endpoint_asked_at_once(process: Process) -> None:
    endpoint, embedder = process()
    endpoint.rest(trouble(ErrorClass.REFUSED))
    assert embed(embedder) == 8
    endpoint.works(seconds=0)
    assert endpoint.resting() is None


# --- an endpoint that was scaled to zero


@pytest.mark.parametrize("protocol", ["tei", "hf"])
def test_a_starting_endpoint_is_asked_once_and_left_to_start(
    server: FakeServer, process: Process, protocol: str
) -> None:
    server.always = "loading" if protocol == "tei" else 503
    endpoint, embedder = process(protocol=protocol, url=server.url if protocol == "tei" else server.hf_url)
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder)
    assert raised.value.error_class is ErrorClass.WARMING
    assert len(server.requests) == 1
    endpoint.rest(raised.value)
    rest = endpoint.resting()
    assert rest is not None
    assert (rest.state, round(rest.seconds, -1)) == ("warming", 30)


def test_the_time_it_says_it_needs_is_given(server: FakeServer, process: Process) -> None:
    server.always = (503, {}, {"error": "Model x is currently loading", "estimated_time": 120.5})
    endpoint, embedder = process()
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder)
    assert endpoint.rest(raised.value) == 120


def test_one_that_starts_for_too_long_is_refused_and_an_operator_told(process: Process, db: Db) -> None:
    endpoint, _ = process()

    def starts_since(seconds: float) -> str | None:
        endpoint.rest(trouble(ErrorClass.WARMING))
        db.execute(
            "UPDATE embed_assets.embedding_endpoints SET until = clock_timestamp() - interval '1 s', "
            "warming_since = clock_timestamp() - %s * interval '1 s'",
            (seconds,),
        )
        endpoint.rest(trouble(ErrorClass.WARMING))
        rest = endpoint.resting()
        return rest and f"{rest.state}: {rest.reason}"

    assert str(starts_since(resource.WARMING_SECONDS - 60)).startswith("warming: ")
    assert str(starts_since(resource.WARMING_SECONDS + 60)).startswith("refused: it has been starting")
    endpoint.works(seconds=0)
    assert value(db, "SELECT warming_since FROM embed_assets.embedding_endpoints") is None


# --- pace


def test_requests_of_all_processes_together_keep_to_the_pace(server: FakeServer, process: Process) -> None:
    pace = {"requests_per_minute": 300, "request_items": 2}
    embedders = [process(**pace)[1] for _ in range(2)]
    for one in embedders:
        embed(one, ["warm"])
    server.forget()
    for one in embedders:
        embed(one)
    at = [request.at for request in server.requests]
    assert len(at) == 8
    assert at[-1] - at[0] >= 7 * 0.2 * 0.95


def test_places_are_given_one_after_another_to_all_processes(process: Process) -> None:
    (first, _), (second, _) = (process(requests_per_minute=6) for _ in range(2))
    waits = [round(endpoint.pace(1), -1) for endpoint in (first, second, first)]
    assert waits == [0, 10, 20]
    assert process()[0].pace(1) == 0


def test_tokens_take_their_share_of_the_minute(process: Process) -> None:
    endpoint, _ = process(tokens_per_minute=600, requests_per_minute=60)
    assert [round(endpoint.pace(tokens)) for tokens in (100, 5, 1)] == [0, 10, 11]


# --- limits


@pytest.mark.ids("E09")
def test_a_limit_that_one_process_ran_into_is_kept_by_the_next(server: FakeServer, process: Process) -> None:
    server.max_items, server.says_info = 5, False
    assert embed(process()[1]) == 8
    assert server.sizes == [8, 5, 3]
    server.forget()
    assert embed(process()[1]) == 8
    assert server.sizes == [5, 3]


@pytest.mark.ids("B-34")
@pytest.mark.parametrize("protocol", ["tei", "openai"])
def test_another_model_at_the_same_address_is_refused_by_every_process(
    server: FakeServer, process: Process, db: Db, protocol: str
) -> None:
    given = {"protocol": protocol} | ({"url": server.openai_url} if protocol == "openai" else {})
    assert embed(process(**given)[1]) == 8
    server.model = "another/model"
    server.forget()
    for _ in range(2):
        with pytest.raises(EndpointTrouble, match="says it serves another model than before") as caught:
            embed(process(**given)[1])
        assert (caught.value.code, caught.value.error_class) == ("model_changed", ErrorClass.CONTRACT)
    assert len(server.requests) == (0 if protocol == "tei" else 2)
    assert embed(process(**given, model="another/model")[1]) == 8
    db.execute("UPDATE embed_assets.embedding_endpoints SET reported = '{}'")
    assert embed(process(**given)[1]) == 8


@pytest.mark.ids("E10", "E17")
def test_bytes_and_characters_are_learned_for_the_next_process_too(process: Process, db: Db) -> None:
    endpoint, _ = process()
    endpoint.learn(Limits(items=7, bytes=800, chars=900))
    assert process()[0].known_limits() == Limits(items=7, bytes=800, chars=900)
    db.execute("UPDATE embed_assets.embedding_endpoints SET learned_at = learned_at - interval '25 h'")
    assert endpoint.known_limits() is None, "a lesson is forgotten after a day"


def test_lessons_of_an_endpoint_with_another_key_are_not_taken(process: Process) -> None:
    process()[0].learn(Limits(items=1))
    assert process(api_key="another")[0].known_limits() is None


# --- the way to it


def test_requests_go_through_the_proxy(server: FakeServer, process: Process) -> None:
    _, embedder = process(protocol="hf", url="http://nowhere.invalid/", proxy=f"http://127.0.0.1:{server.port}")
    assert embed(embedder) == 8
    assert server.requests[0].path == "http://nowhere.invalid/"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 signed by itself, and its key."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("there is no openssl to make a certificate with")
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", made, "-days", "2"]
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    return made, key


def test_a_server_with_a_certificate_of_ones_own_is_trusted_by_its_bundle(
    process: Process, certificate: tuple[Path, Path]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with FakeServer(tls=context) as server:
        trusting = process(protocol="hf", url=server.hf_url, ca_bundle=certificate[0])[1]
        assert embed(trusting) == 8
        doubting = process(protocol="hf", url=server.hf_url)[1]
        with pytest.raises(EndpointTrouble, match="check EMBED_CA_BUNDLE") as raised:
            embed(doubting)
    assert raised.value.error_class is ErrorClass.REFUSED
