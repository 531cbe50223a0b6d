"""The fake embedding server: as real servers are where it behaves, and as bad as they get where it is told to."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
import yaml

from embed_assets.embedding import HttpEmbedder, Rejected
from embed_assets.errors import ConfigurationError, EndpointTrouble
from embed_assets.fake_server import FakeServer, Fault, answers, vector_for
from embed_assets.fake_server.faults import FAULTS
from embed_assets.stop import Stop

DATA = Path(__file__).resolve().parents[3] / "shared/data"
HARMLESS = {"permuted", "floats"}
OPENAI_ONLY = {"permuted", "floats", "other_model", "bad_base64"} | {name for name in FAULTS if "index" in name}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def post(server: FakeServer, url: str, *texts: str, **more: object) -> httpx.Response:
    name = "input" if "v1" in url else "inputs"
    return httpx.post(url, json={name: list(texts), **more}, timeout=5)


def recorded(path: str) -> Path:
    found = DATA / path
    if not found.exists():
        pytest.skip("the recordings are not here")
    return found


def schema(name: str, version: str) -> dict:
    return orjson.loads(recorded(f"tei/openapi-{version}.json").read_bytes())["components"]["schemas"][name]


# --- as real servers are


@pytest.mark.parametrize("version", ["1.8.3", "1.9.3"])
def test_what_it_says_of_itself_has_all_that_tei_s_schema_asks_for(server, version):
    server.speaks = f"tei-{version[:3]}"
    said = httpx.get(f"{server.hf_url}info").json()
    wanted = schema("Info", version)
    assert set(wanted["required"]) <= set(said)
    assert set(said) <= {*wanted["properties"]}
    assert said["version"] == version


@pytest.mark.parametrize("speaks", ["tei-1.8", "tei-1.9"])
def test_its_errors_are_those_that_were_derived_from_tei(server, speaks):
    examples = orjson.loads(recorded("tei/tei-errors-derived.json").read_bytes())["examples"]
    server.speaks, server.max_items, server.max_tokens = speaks, 32, 512

    def told(like: str, route: str | None = None) -> tuple[int, object]:
        for one in examples:
            body = orjson.dumps(one.get("body", "")).decode()
            if like in body and one.get("route") == route and one["version"][:3] in (speaks[4:], "any"):
                return one["status"], one["body"]
        raise AssertionError(f"no example like {like}")

    many = post(server, server.url, *["x"] * 33)
    assert (many.status_code, many.json()) == told("batch size 33")
    long = post(server, server.url, "x " * 620)
    assert (long.status_code, long.json()) == told("Given: 620")
    if speaks == "tei-1.9":
        assert post(server, server.openai_url, *["x"] * 33).json() == told("batch size 33", "/v1/embeddings")[1]
        server.then("overloaded")
        busy = post(server, server.url, "x")
        assert (busy.status_code, busy.json()) == told("overloaded")
        assert "retry-after" not in busy.headers
    server.max_bytes = 100
    big = post(server, server.url, "x" * 200)
    assert (big.status_code, big.text) == (413, "Failed to buffer the request body: length limit exceeded")
    server.api_key = "secret"
    closed = post(server, server.url, "x")
    assert (closed.status_code, closed.content) == (401, b"")


def test_its_answers_have_the_keys_of_openai_s_recording(server):
    recording = yaml.safe_load(recorded("openai/embeddings_3-small_multiple.yml").read_text())
    real = orjson.loads(recording["http_interactions"][0]["response"]["body"]["string"])
    ours = post(server, server.openai_url, "Ruby", "Python", "JavaScript").json()
    assert set(ours) == set(real)
    assert set(ours["usage"]) == set(real["usage"])
    assert [(set(one), one["object"], one["index"]) for one in ours["data"]] == [
        (set(one), one["object"], one["index"]) for one in real["data"]
    ]


def test_it_refuses_a_key_in_openai_s_words(server):
    real = yaml.safe_load(recorded("openai/error_401_auth.yml").read_text())["http_interactions"][0]["response"]
    server.speaks, server.api_key = "openai", "right"
    headers = {"authorization": "Bearer invalid-key"}
    answer = httpx.post(server.openai_url, json={"input": ["x"]}, headers=headers)
    wanted = orjson.loads(real["body"]["string"])["error"]
    assert answer.status_code == 401
    assert set(answer.json()["error"]) == set(wanted)
    assert answer.json()["error"]["code"] == wanted["code"]
    assert wanted["message"].startswith(answer.json()["error"]["message"])


def test_a_foreign_client_understands_it(server):
    tei_client = pytest.importorskip("tei_client")
    client = tei_client.HttpClient(server.hf_url)
    info = client.info()
    assert (info.max_client_batch_size, info.max_input_length, info.version) == (32, 512, "1.9.3")
    assert client.health()
    vectors = client.embed(["one", "two"])
    np.testing.assert_allclose(vectors, [vector_for("one", 8), vector_for("two", 8)], rtol=1e-6)


# --- as bad as they get


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_by_name_is_met_by_the_client_and_no_wrong_vector_comes_of_it(server, name):
    server.poison = {"BAD": name}
    protocol = "openai" if name in OPENAI_ONLY else "tei"
    url = server.openai_url if protocol == "openai" else server.url
    embedder = HttpEmbedder(
        protocol, url, identity="fake", model="stub/model", dimensions=8, retry_base=0.01, attempt_timeout=0.15
    )
    list(embedder.embed(["good"], stop=Stop()))
    texts = ["one", "BAD", "two"]
    results = []
    trouble = None
    try:
        for result in embedder.embed(texts, stop=Stop()):
            results.append(result)
    except EndpointTrouble as raised:
        trouble = raised
    embedder.close()
    vectors = [result for result in results if not isinstance(result, Rejected)]
    for result in vectors:
        for at, vector in zip(result.positions, result.vectors, strict=True):
            np.testing.assert_array_equal(vector, vector_for(texts[at], 8))
            assert name in HARMLESS | {"duplicate_index"} or texts[at] != "BAD"
    assert name in HARMLESS | {"duplicate_index"} or trouble or any(isinstance(one, Rejected) for one in results)


def test_a_share_of_the_requests_fails_and_the_same_ones_for_the_same_seed():
    def statuses(seed: int) -> list[int]:
        faults = [Fault.parse("503=0.3"), Fault.parse("overloaded=0.2")]
        with FakeServer(faults=faults, seed=seed) as server, httpx.Client() as client:
            return [client.post(server.url, json={"inputs": ["x"]}).status_code for _ in range(60)]

    first = statuses(1)
    assert first == statuses(1) != statuses(2)
    assert 8 <= first.count(503) <= 28
    assert 4 <= first.count(429) <= 20
    assert first.count(200) >= 15


def test_a_marked_text_fails_always_and_the_others_never():
    with FakeServer(faults=[Fault.parse("400@salary")]) as server:
        assert post(server, server.url, "x", "a salary").status_code == 400
        assert post(server, server.url, "x").status_code == 200


@pytest.mark.parametrize("given", ["zebra", "200", "zero=2", "zero=x", "zero@", "zero=0.5@word", ""])
def test_a_fault_that_is_unknown_or_badly_written_is_refused_with_what_is_known(given):
    with pytest.raises(ConfigurationError, match=f"--fault {given}: (known are|write it)"):
        Fault.parse(given)


def test_over_its_rate_it_asks_to_be_left_alone_until_the_minute_is_over():
    with FakeServer(requests_per_minute=2, minute=0.5) as server:
        answers = [post(server, server.url, "x") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[-1].headers["retry-after"] == "1"
        time.sleep(0.5)
        assert post(server, server.url, "x").status_code == 200
        assert len(server.rests) == 1


def test_it_counts_tokens_for_its_rate_too():
    with FakeServer(tokens_per_minute=10, minute=5) as server:
        assert post(server, server.url, "one two three").status_code == 200
        assert post(server, server.url, "one two three " * 3).status_code == 429


def test_it_warms_from_the_first_request_on():
    with FakeServer(warming_seconds=0.3) as server:
        cold = post(server, server.url, "x")
        assert (cold.status_code, "loading" in cold.text) == (503, True)
        time.sleep(0.35)
        assert post(server, server.url, "x").status_code == 200


def test_tokens_are_words_and_signs():
    assert [answers.tokens_in(text) for text in ("two words", "一二三", "a" * 25, "")] == [2, 3, 3, 0]


def test_the_command_says_where_it_listens_and_fails_as_told():
    command = [sys.executable, "-m", "embed_assets", "fake-server", "--port", "0", "--fault", "503@BAD"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().rpartition("EMBED_URL=")[2].split()[0]
            assert httpx.post(url, json={"inputs": ["fine"]}).status_code == 200
            assert httpx.post(url, json={"inputs": ["BAD"]}).status_code == 503
        finally:
            process.terminate()


def test_the_command_lists_its_faults():
    command = [sys.executable, "-m", "embed_assets", "fake-server", "--list-faults"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(f"{name} " in listed for name in FAULTS)
