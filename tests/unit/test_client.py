"""The HTTP embedder against a real server: shapes, attempts, whose fault it was, and how it stops."""

from __future__ import annotations

import gzip
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import orjson
import pytest

from embed_assets.embedding import Embedded, HttpEmbedder, Rejected, client
from embed_assets.embedding.batches import Limits, batches
from embed_assets.embedding.faults import from_status, retry_after
from embed_assets.embedding.protocols import BadAnswer, OpenAI, Tei, wire
from embed_assets.errors import (
    AnswerContract,
    Cancelled,
    ConfigurationError,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    InputTooLong,
    LeaseLost,
    WaveTimeout,
)
from embed_assets.fake_server import FakeServer, vector_for
from embed_assets.fake_server.answers import tokens_in
from embed_assets.stop import Stop

DATA = Path(__file__).resolve().parents[3] / "shared/data"
TEXTS = [f"text {n}" for n in range(8)]
BAD_ANSWERS = ["null", "nan", "zero", "empty", "words", "infinite", "short", "long", "one_too_wide"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as stub:
        yield stub


@pytest.fixture
def connect(server):
    """Makes embedders of the server that are closed after the test."""
    made = []

    def make(protocol="tei", **options):
        url = {"tei": server.url, "openai": server.openai_url, "hf": server.hf_url}[protocol]
        options = {"identity": "stub-v1", "model": "stub/model", "dimensions": 8, "retry_base": 0.01, **options}
        made.append(HttpEmbedder(protocol, url, **options))
        return made[-1]

    yield make
    for embedder in made:
        embedder.close()


def embed(embedder, texts) -> tuple[dict[int, np.ndarray], dict[int, Exception]]:
    """Vectors and errors by position; each position at most once."""
    vectors: dict[int, np.ndarray] = {}
    errors: dict[int, Exception] = {}
    for result in embedder.embed(texts, stop=Stop()):
        found = result.vectors if isinstance(result, Embedded) else [result.error] * len(result.positions)
        for at, value in zip(result.positions, found, strict=True):
            assert at not in vectors | errors
            (vectors if isinstance(result, Embedded) else errors)[at] = value
    return vectors, errors


def assert_right(vectors, texts, positions=None):
    assert sorted(vectors) == list(range(len(texts)) if positions is None else positions)
    for at, vector in vectors.items():
        np.testing.assert_array_equal(vector, vector_for(texts[at], len(vector)))


# --- requests and answers


@pytest.mark.ids("A-54")
@pytest.mark.parametrize("protocol", ["tei", "openai", "hf"])
def test_every_text_gets_its_own_vector_whatever_the_concurrency(server, connect, protocol):
    server.seconds_per_request = 0.01
    texts = [f"text {n}" for n in range(200)]
    vectors, errors = embed(connect(protocol, concurrency=4), texts)
    assert_right(vectors, texts)
    assert not errors
    assert sorted(server.sizes) == [8, 32, 32, 32, 32, 32, 32]
    assert 2 <= server.most_in_flight <= 4


@pytest.mark.ids("A-62")
@pytest.mark.parametrize("options", [{}, {"concurrency": 0}], ids=str)
def test_one_request_is_in_flight_unless_more_are_asked_for(server, connect, options):
    server.seconds_per_request = 0.01
    embed(connect(**options), [f"text {n}" for n in range(100)])
    assert server.most_in_flight == 1


@pytest.mark.ids("A-57")
@pytest.mark.parametrize("path", ["/embed", "/"])
def test_both_shapes_of_an_answer_are_accepted(server, path):
    embedder = HttpEmbedder("hf", f"http://127.0.0.1:{server.port}{path}", identity="stub-v1")
    assert_right(embed(embedder, TEXTS)[0], TEXTS)
    embedder.close()


@pytest.mark.ids("A-57")
def test_another_shape_is_rejected(server, connect):
    server.always = "unknown_shape"
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.CONTRACT, "unknown_shape")


@pytest.mark.ids("E11")
def test_texts_are_never_truncated_by_the_server(server, connect):
    embed(connect(), TEXTS)
    assert server.requests[0].body == {"inputs": TEXTS, "truncate": False}


@pytest.mark.ids("E05")
@pytest.mark.parametrize("behaviour", ["permuted", "floats", None])
def test_openai_answers_are_placed_by_index_in_either_encoding(server, connect, behaviour):
    server.always = behaviour
    vectors, _ = embed(connect("openai"), TEXTS)
    assert_right(vectors, TEXTS)
    assert server.requests[0].body == {"model": "stub/model", "input": TEXTS, "encoding_format": "base64"}


@pytest.mark.ids("E05", "B-34")
@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ("index_out_of_range", "wrong_index"),
        ("bool_index", "wrong_index"),
        ("no_index", "wrong_index"),
        ("bad_base64", "invalid_base64"),
        ("short", "count_mismatch"),
        ("long", "count_mismatch"),
    ],
)
def test_an_answer_that_cannot_be_placed_is_accepted_in_no_part(server, connect, behaviour, code):
    server.always = behaviour
    results = []
    with pytest.raises(EndpointTrouble) as raised:
        results += connect("openai").embed(TEXTS, stop=Stop())
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.CONTRACT, code)
    assert results == []


@pytest.mark.ids("E05")
def test_two_vectors_for_one_index_are_not_shared_out(server, connect):
    server.always = "duplicate_index"
    vectors, errors = embed(connect("openai"), TEXTS)
    assert_right(vectors, TEXTS)
    assert not errors
    assert [len(request.texts) for request in server.requests if request.texts != ["probe"]].count(1) == 8


@pytest.mark.ids("B-35")
def test_another_model_between_two_requests_ends_the_call(server, connect):
    server.then(None, "other_model")
    results = []
    with pytest.raises(EndpointTrouble) as raised:
        results.extend(connect("openai", request_items=4).embed(TEXTS, stop=Stop()))
    assert raised.value.code == "model_changed"
    assert [result.positions for result in results] == [[0, 1, 2, 3]]


def test_tokens_are_what_the_endpoint_counted(connect):
    for protocol, tokens in (("tei", 16), ("openai", 16), ("hf", 0)):
        results = list(connect(protocol).embed(TEXTS, stop=Stop()))
        assert sum(result.tokens for result in results) == tokens


@pytest.mark.ids("A-58")
def test_the_key_is_sent_only_when_there_is_one(server, connect):
    embed(connect(), ["a"])
    embed(connect(api_key="secret", headers={"X-Team": "search"}), ["a"])
    embed(connect(api_key="  "), ["a"])
    sent = [request.headers.get("authorization") for request in server.requests]
    assert sent == [None, "Bearer secret", None]
    assert server.requests[1].headers["x-team"] == "search"


@pytest.mark.ids("E20")
def test_a_key_of_any_length_is_sent_whole_and_shown_nowhere(server, connect):
    key = "k3y" * 700
    server.api_key = key
    embedder = connect(api_key=key + "\n")
    assert_right(embed(embedder, TEXTS)[0], TEXTS)
    server.api_key = "another"
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, TEXTS)
    shown = f"{raised.value!r} {raised.value} {raised.value.__cause__} {embedder!r} {vars(embedder)}"
    assert "k3y" not in shown
    with pytest.raises(ConfigurationError) as broken:
        connect(api_key="k3y\nk3y")
    assert "k3y" not in str(broken.value)


@pytest.mark.ids("A-58")
def test_a_key_goes_before_the_user_in_an_address(server):
    url = f"http://user:pass@127.0.0.1:{server.port}/embed"
    for key, sent in ((None, "Basic dXNlcjpwYXNz"), ("secret", "Bearer secret")):
        embedder = HttpEmbedder("tei", url, identity="stub-v1", api_key=key)
        embed(embedder, ["a"])
        embedder.close()
        assert server.requests[-1].headers["authorization"] == sent


def test_secrets_in_the_address_are_not_shown(server):
    url = f"http://user:s3cret@127.0.0.1:{server.port}/embed?token=s3cret"
    server.always = 403
    embedder = HttpEmbedder("tei", url, identity="stub-v1")
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, ["a"])
    assert "s3cret" not in f"{embedder!r} {raised.value}"
    assert f"127.0.0.1:{server.port}/embed" in str(raised.value)
    embedder.close()


@pytest.mark.ids("E24")
def test_a_bare_string_is_refused_before_anything_is_sent(server, connect):
    with pytest.raises(TypeError, match="not one string"):
        connect().embed("document", stop=Stop())
    assert server.requests == []


@pytest.mark.ids("E01")
def test_blank_texts_are_never_sent(server, connect):
    vectors, errors = embed(connect(), ["a", "", " \n", "b", "\ud800"])
    assert sorted(vectors) == [0, 3]
    assert {at: error.code for at, error in errors.items()} == {1: "empty_text", 2: "empty_text", 4: "not_unicode"}
    assert server.texts == ["a", "b"]


def test_nothing_to_embed_needs_no_request(server, connect):
    assert embed(connect(), []) == ({}, {})
    assert server.requests == []


@pytest.mark.ids("E15")
def test_an_answer_may_be_packed_and_a_packed_one_that_is_cut_is_a_cut_one(server, connect):
    packed = gzip.compress(orjson.dumps([vector_for("a", 8).tolist()]))
    server.then((200, {"content-encoding": "gzip"}, packed[:-4]), (200, {"content-encoding": "gzip"}, packed))
    vectors, _ = embed(connect(), ["a"])
    np.testing.assert_allclose(vectors[0], vector_for("a", 8), rtol=1e-6)
    assert server.sizes == [1, 1]
    assert server.requests[0].headers["accept-encoding"] == "gzip"


# --- attempts


@pytest.mark.ids("A-55", "C-32")
@pytest.mark.parametrize(
    ("script", "sent"),
    [
        ([503, 503], 3),
        ([429], 2),
        ([500], 2),
        ([502, 504, 408, 424], 5),
        (["reset"], 2),
        (["cut"], 2),
        (["garbage", "cut"], 3),
    ],
    ids=str,
)
def test_passing_troubles_are_tried_again(server, connect, script, sent):
    server.then(*script)
    vectors, _ = embed(connect(), TEXTS)
    assert_right(vectors, TEXTS)
    assert server.sizes == [8] * sent


@pytest.mark.ids("A-55")
@pytest.mark.parametrize(
    ("status", "error_class", "requests"),
    [
        (502, ErrorClass.UNAVAILABLE, 5),
        (503, ErrorClass.UNAVAILABLE, 5),
        (429, ErrorClass.RATE_LIMITED, 5),
        (401, ErrorClass.REFUSED, 1),
        (403, ErrorClass.REFUSED, 1),
        (404, ErrorClass.REFUSED, 1),
        (302, ErrorClass.REFUSED, 1),
    ],
)
def test_lasting_troubles_are_the_endpoints_and_are_given_up(server, connect, status, error_class, requests):
    server.always = status
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert (raised.value.error_class, raised.value.code) == (error_class, f"http_{status}")
    assert len(server.requests) == requests


@pytest.mark.ids("A-55", "E14")
def test_a_text_that_is_refused_is_sent_once(server, connect):
    server.poison = {"BAD": 400}
    embedder = connect()
    embed(embedder, ["good"])
    server.forget()
    _, errors = embed(embedder, ["BAD"])
    assert type(errors[0]) is InputRejected
    assert server.texts == ["BAD"]


@pytest.mark.ids("E14")
def test_an_endpoint_that_refuses_everything_is_to_blame_and_no_text(server, connect):
    server.always = 400
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert raised.value.error_class == ErrorClass.REFUSED
    assert len(server.requests) == 2


def test_a_model_that_is_loading_is_warming(server, connect):
    server.always = (503, {}, {"error": "Model stub/model is currently loading", "estimated_time": 20.0})
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert raised.value.error_class == ErrorClass.WARMING


def test_no_server_at_all_is_unavailable():
    embedder = HttpEmbedder("tei", "http://127.0.0.1:9/embed", identity="stub-v1", retry_base=0.01)
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, TEXTS)
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.UNAVAILABLE, "connect")
    embedder.close()


def test_attempts_are_spaced_ever_wider(server, connect):
    server.then(503, 503, 503)
    began = time.monotonic()
    embed(connect(retry_base=0.1), TEXTS)
    assert 0.7 * 0.8 <= time.monotonic() - began < 1.2


@pytest.mark.ids("E12")
def test_retry_after_is_waited_for(server, connect):
    server.then((429, {"retry-after": "1"}, {}))
    began = time.monotonic()
    embed(connect(), TEXTS)
    assert 1 <= time.monotonic() - began < 2


@pytest.mark.ids("E12")
def test_a_long_retry_after_is_handed_to_the_caller_instead_of_waited_for(server, connect):
    server.always = (429, {"retry-after": "86400"}, {})
    began = time.monotonic()
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert time.monotonic() - began < 1
    assert len(server.requests) == 1
    assert (raised.value.error_class, raised.value.retry_after) == (ErrorClass.RATE_LIMITED, 3600)


@pytest.mark.ids("E12")
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", None),
        ("0", None),
        ("-5", None),
        ("soon", None),
        ("", None),
        (None, None),
        ("86400", 3600),
    ],
)
def test_retry_after_is_read_in_both_forms(header, seconds):
    assert retry_after(header, now=1445412480.0) == seconds


@pytest.mark.ids("A-56", "E18")
def test_each_attempt_has_its_own_timeout_and_is_tried_again(server, connect):
    server.then("hang", "hang")
    began = time.monotonic()
    vectors, _ = embed(connect(attempt_timeout=0.3), ["only"])
    assert sorted(vectors) == [0]
    assert 0.6 <= time.monotonic() - began < 2
    assert server.sizes == [1, 1, 1]


@pytest.mark.ids("A-56")
def test_a_server_that_trickles_is_timed_out_as_a_whole(server, connect):
    server.always = "trickle"
    embedder = connect(attempt_timeout=0.15)
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, ["only"])
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.UNAVAILABLE, "timeout")
    assert len(server.requests) == 5


@pytest.mark.ids("E17", "C-31")
def test_a_request_that_times_out_is_halved_and_the_size_remembered(server, connect):
    server.then("hang", "hang")
    embedder = connect(attempt_timeout=0.3)
    vectors, _ = embed(embedder, TEXTS)
    assert_right(vectors, TEXTS)
    assert server.sizes == [8, 4, 2, 2, 2, 2]
    server.forget()
    embed(embedder, TEXTS)
    assert server.sizes == [2, 2, 2, 2]


def test_requests_grow_again_after_many_that_were_in_time(server, connect):
    server.then("hang")
    embedder = connect(attempt_timeout=0.3)
    embed(embedder, TEXTS)
    assert embedder.limits.chars == 24
    embed(embedder, [f"text {n:02}" for n in range(250)])
    assert embedder.limits.chars > 24
    assert max(server.sizes[-3:]) > 3
    embed(embedder, [f"text {n:04}" for n in range(3000)])
    assert server.sizes[-3] == 32


@pytest.mark.ids("E17")
def test_a_server_that_never_answers_gets_five_attempts_and_smaller_requests_the_next_time(server, connect):
    server.always = "hang"
    embedder = connect(attempt_timeout=0.1)
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, ["x" * 10] * 32)
    assert raised.value.code == "timeout"
    assert server.sizes == [32, 16, 8, 4, 2]
    assert embedder.limits.chars == 20


@pytest.mark.ids("E18")
def test_a_host_that_does_not_accept_is_not_a_slow_one():
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for waiting in (first, second):  # fill the backlog: the next connection is ignored
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/embed"
        embedder = HttpEmbedder("hf", url, identity="stub-v1", attempt_timeout=0.2, retry_base=0.01)
        with pytest.raises(EndpointTrouble) as raised:
            embed(embedder, TEXTS)
        embedder.close()
    assert raised.value.code == "connect"
    assert embedder.limits == Limits()


@pytest.mark.ids("E17")
def test_a_slow_server_is_given_what_it_can_do_in_time(server, connect):
    server.seconds_per_text = 0.05
    vectors, _ = embed(connect(attempt_timeout=0.3), TEXTS)
    assert_right(vectors, TEXTS)
    assert server.sizes[-1] <= 4


@pytest.mark.ids("A-60")
def test_the_first_fatal_failure_ends_the_others(server, connect):
    server.poison = {"text 0": 401}
    server.seconds_per_request = 5
    began = time.monotonic()
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(concurrency=4, request_items=1), TEXTS)
    assert raised.value.code == "http_401"
    assert time.monotonic() - began < 1
    assert len(server.requests) <= 4


def test_what_was_finished_before_a_failure_is_yielded(server, connect):
    server.then(None, 401)
    results = []
    with pytest.raises(EndpointTrouble):
        results.extend(connect(request_items=4).embed(TEXTS, stop=Stop()))
    assert [result.positions for result in results] == [[0, 1, 2, 3]]


# --- guilty texts


@pytest.mark.ids("E01", "E08")
def test_a_refused_text_is_found_and_the_others_are_embedded(server, connect):
    server.poison = {"BAD": 400}
    texts = [*TEXTS[:3], "BAD", *TEXTS[3:]]
    vectors, errors = embed(connect(), texts)
    assert_right(vectors, texts, [0, 1, 2, 4, 5, 6, 7, 8])
    assert type(errors[3]) is InputRejected
    assert errors[3].code == "http_400"
    assert "BAD" not in str(errors[3])


@pytest.mark.ids("E02", "E03", "E22")
@pytest.mark.parametrize("behaviour", BAD_ANSWERS)
def test_a_text_whose_answer_breaks_the_contract_is_found_and_never_stored(server, connect, behaviour):
    server.poison = {"BAD": behaviour}
    texts = [*TEXTS[:5], "BAD", *TEXTS[5:]]
    vectors, errors = embed(connect(), texts)
    assert_right(vectors, texts, [0, 1, 2, 3, 4, 6, 7, 8])
    assert type(errors[5]) is AnswerContract
    assert server.sizes[:2] == [9, 9]  # repeated before it is divided
    assert server.texts[-2:] == ["BAD", "BAD"] or server.texts.count("BAD") >= 4


@pytest.mark.ids("E07", "C-34")
@pytest.mark.parametrize("behaviour", ["short", "long"])
def test_another_number_of_vectors_than_texts_is_an_error_for_the_request(server, connect, behaviour):
    server.then(behaviour)
    vectors, errors = embed(connect(), TEXTS)
    assert_right(vectors, TEXTS)
    assert not errors
    assert server.sizes == [8, 8]


@pytest.mark.ids("E15")
@pytest.mark.parametrize("behaviour", ["cut", "garbage"])
def test_a_text_whose_answer_is_always_cut_is_found(server, connect, behaviour):
    server.poison = {"BAD": behaviour}
    embedder = connect()
    embed(embedder, ["good"])
    vectors, errors = embed(embedder, [*TEXTS, "BAD"])
    assert_right(vectors, [*TEXTS, "BAD"], range(8))
    assert type(errors[8]) is AnswerContract


@pytest.mark.ids("E02")
@pytest.mark.parametrize("status", [500, 424])
def test_a_text_on_which_the_model_breaks_down_is_found(server, connect, status):
    server.poison = {"BAD": (status, {}, {"error": "unsupported value: NaN", "error_type": "Backend"})}
    vectors, errors = embed(connect(), [*TEXTS, "BAD"])
    assert_right(vectors, [*TEXTS, "BAD"], range(8))
    assert type(errors[8]) is AnswerContract


@pytest.mark.ids("E15")
@pytest.mark.parametrize("behaviour", ["cut", "garbage", 500])
def test_an_endpoint_that_always_breaks_is_to_blame_and_no_text(server, connect, behaviour):
    server.always = behaviour
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), TEXTS)
    assert raised.value.error_class == ErrorClass.UNAVAILABLE
    assert server.sizes == [8, 8, 8, 8, 8, 1, 1]


@pytest.mark.ids("E22")
@pytest.mark.parametrize("texts", [["one"], TEXTS])
def test_an_endpoint_that_answers_only_zeros_is_to_blame_and_no_text(server, connect, texts):
    server.always = "zero"
    with pytest.raises(EndpointTrouble) as raised:
        embed(connect(), texts)
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.CONTRACT, "zero_vector")
    assert len(server.requests) <= 4


def test_many_guilty_texts_are_told_from_a_broken_endpoint(server, connect):
    server.poison = {"BAD": "zero"}
    _, errors = embed(connect(), [f"BAD {n}" for n in range(20)])
    assert len(errors) == 20
    assert server.texts.count("probe") <= 8


@pytest.mark.ids("E04", "A-59", "B-34")
def test_another_width_is_the_endpoints_fault_at_the_first_answer(server, connect):
    results = []
    with pytest.raises(EndpointTrouble) as raised:
        results += connect(dimensions=1024).embed([f"text {n}" for n in range(500)], stop=Stop())
    assert (raised.value.error_class, raised.value.code) == (ErrorClass.CONTRACT, "wrong_width")
    assert results == []
    assert len(server.requests) == 1


@pytest.mark.ids("E04")
def test_the_width_is_learned_from_the_first_answer_and_kept(server, connect):
    embedder = connect(dimensions=None)
    assert embedder.dimensions == 8
    server.dimensions = 9
    with pytest.raises(EndpointTrouble) as raised:
        embed(embedder, TEXTS)
    assert raised.value.code == "wrong_width"


# --- sizes


@pytest.mark.ids("E09")
@pytest.mark.parametrize("speaks", ["tei-1.8", "tei-1.9", "openai"])
def test_a_batch_over_the_servers_limit_is_cut_to_it_for_good(server, connect, speaks):
    server.max_items, server.speaks, server.says_info = 10, speaks, False
    texts = [f"text {n}" for n in range(64)]
    embedder = connect()
    vectors, _ = embed(embedder, texts)
    assert_right(vectors, texts)
    assert server.sizes[0] == 32
    assert max(server.sizes[1:]) == 10
    assert embedder.limits.items == 10


@pytest.mark.ids("E09")
def test_the_limit_that_the_server_names_beforehand_is_kept(server, connect):
    server.max_items = 5
    embed(connect(), TEXTS)
    assert server.sizes == [5, 3]


@pytest.mark.ids("E09")
@pytest.mark.parametrize("status", [413, 422, 400])
def test_a_size_that_is_refused_without_a_word_is_halved_and_remembered(server, connect, status):
    server.script = ()
    server.then((status, {}, ""))
    embedder = connect("openai")
    embed(embedder, ["warm"])
    server.forget()
    server.then((status, {}, ""))
    vectors, errors = embed(embedder, TEXTS)
    assert_right(vectors, TEXTS)
    assert not errors
    assert server.sizes == [8, 4, 4]
    assert embedder.limits.items == 4


@pytest.mark.ids("E10")
def test_requests_are_bounded_by_bytes(server, connect):
    server.max_bytes, server.says_info = 200_000, False
    texts = [f"{n}" + "é" * 40_000 for n in range(6)]
    embedder = connect()
    vectors, _ = embed(embedder, texts)
    assert_right(vectors, texts)
    server.forget()
    embed(embedder, texts)
    assert server.sizes == [2, 2, 2]
    assert embedder.limits.items == 32


@pytest.mark.ids("E10")
def test_more_bytes_than_a_server_may_take_are_never_sent_at_once(server, connect):
    server.says_info = False
    embed(connect(), ["汉" * 27_000] * 32)  # fewer characters than one request may hold
    assert max(len(orjson.dumps(request.body)) for request in server.requests) < 2_000_000


@pytest.mark.ids("E10")
@pytest.mark.parametrize("sign", ["words ", "汉"])
def test_a_request_holds_no_more_tokens_than_the_server_computes_at_once(server, connect, sign):
    server.max_batch_tokens = 2000
    embed(connect(), [sign * 400] * 12)
    assert max(sum(map(tokens_in, request.texts)) for request in server.requests) <= 2000
    assert max(server.sizes) > 1


@pytest.mark.ids("E11", "C-35")
@pytest.mark.parametrize("speaks", ["tei-1.8", "tei-1.9", "openai"])
def test_one_text_over_the_token_limit_is_found_and_sizes_stay(server, connect, speaks):
    server.max_tokens, server.speaks, server.says_info = 500, speaks, False
    texts = [*TEXTS[:3], "x " * 620, *TEXTS[3:]]
    embedder = connect()
    vectors, errors = embed(embedder, texts)
    assert_right(vectors, texts, [0, 1, 2, 4, 5, 6, 7, 8])
    assert type(errors[3]) is InputTooLong
    assert embedder.limits == Limits()


def test_too_many_tokens_in_all_are_halved_by_length(server, connect):
    server.then((400, {}, {"error": "maximum 8000 tokens per request"}))
    embedder = connect()
    vectors, errors = embed(embedder, ["x" * 100] * 8)
    assert (len(vectors), errors) == (8, {})
    assert (embedder.limits.items, embedder.limits.chars) == (32, 400)


def test_a_part_of_what_was_merely_too_much_is_no_suspect(server, connect):
    server.max_items, server.says_info = 4, False
    embedder = connect()
    server.then((422, {}, "maximum batch size 4"), 500, 500, 500)
    vectors, _ = embed(embedder, TEXTS)
    assert_right(vectors, TEXTS)
    assert server.sizes == [8, 4, 4, 4, 4, 4]


def test_a_single_text_over_the_byte_limit_is_too_long(server, connect):
    server.max_bytes = 1000
    _, errors = embed(connect(), ["x" * 2000])
    assert type(errors[0]) is InputTooLong


def test_limits_only_fall_and_stop_at_one():
    limits = Limits()
    limits.lower(items=100, chars=0, bytes=None)
    limits.lower(items=-3)
    assert limits == Limits(items=1)


@pytest.mark.ids("B-33")
def test_batches_keep_order_and_bounds():
    texts = ["a" * 10, "b" * 10, "c" * 25, "d", "e", "f"]
    assert list(batches(texts, Limits(chars=20), range(6))) == [[0, 1], [2], [3, 4, 5]]
    assert list(batches(texts, Limits(items=2), [5, 3, 1])) == [[5, 3], [1]]
    assert list(batches(texts, Limits(bytes=60), range(6))) == [[0, 1], [2, 3], [4, 5]]


# --- stopping


@pytest.mark.ids("A-56", "A-28", "A-29")
@pytest.mark.parametrize(
    ("end", "error"), [("cancel", Cancelled), ("lose", LeaseLost), ("budget", WaveTimeout)], ids=str
)
def test_a_stop_drops_what_is_in_flight_at_once_and_is_never_tried_again(server, connect, end, error):
    embedder = connect(concurrency=2, request_items=4)
    embed(embedder, ["warm"])
    server.forget()
    server.always = "hang"
    stop = Stop(seconds=0.3) if end == "budget" else Stop()
    if end != "budget":
        threading.Timer(0.3, getattr(stop, end)).start()
    began = time.monotonic()
    with pytest.raises(error):
        list(embedder.embed(TEXTS, stop=stop))
    assert time.monotonic() - began < 0.5
    time.sleep(0.2)
    assert len(server.requests) == server.dropped == 2


@pytest.mark.ids("C-33")
def test_a_stop_is_no_time_out_and_halves_nothing(server, connect):
    server.always = "hang"
    embedder = connect(attempt_timeout=0.4)
    with pytest.raises(WaveTimeout):
        list(embedder.embed(TEXTS, stop=Stop(seconds=0.2)))
    time.sleep(0.6)
    assert server.sizes == [8]
    assert embedder.limits.chars == Limits().chars


def test_a_call_that_was_stopped_before_it_began_sends_nothing(server, connect):
    stop = Stop()
    stop.cancel()
    with pytest.raises(Cancelled):
        list(connect().embed(TEXTS, stop=stop))
    time.sleep(0.05)
    assert server.requests == []


def test_a_request_that_timed_out_is_not_left_running(server, connect):
    server.then("hang")
    embed(connect(attempt_timeout=0.2), ["a"])
    time.sleep(0.1)
    assert server.dropped == 1


def test_the_end_is_seen_even_if_closing_overtook_the_call():
    work: Future[None] = Future()
    work.cancel()
    assert client._next(queue.SimpleQueue(), work, Stop()) is None


@pytest.mark.ids("E12")
def test_a_stop_ends_the_wait_between_attempts(server, connect):
    server.always = (429, {"retry-after": "30"}, {})
    stop = Stop(seconds=0.3)
    began = time.monotonic()
    with pytest.raises(WaveTimeout):
        list(connect().embed(TEXTS, stop=stop))
    assert time.monotonic() - began < 0.6


def test_leaving_the_iterator_drops_the_rest(server, connect):
    server.seconds_per_request = 0.05
    results = connect(request_items=1).embed([f"text {n}" for n in range(50)], stop=Stop())
    next(results)
    results.close()
    time.sleep(0.15)
    sent = len(server.requests)
    time.sleep(0.2)
    assert len(server.requests) == sent < 10


def test_closing_ends_a_call_in_another_thread_and_those_that_come_later(server, connect):
    server.always = "hang"
    embedder = connect()
    threading.Timer(0.2, embedder.close).start()
    with pytest.raises(Cancelled):
        list(embedder.embed(TEXTS, stop=Stop()))
    with pytest.raises(Cancelled):
        list(embedder.embed(TEXTS, stop=Stop()))
    with pytest.raises(Cancelled):
        embedder.embed_query("cook", timeout=5)
    embedder.close()


def test_a_query_in_flight_ends_when_the_embedder_is_closed(server, connect):
    server.always = "hang"
    embedder = connect()
    threading.Timer(0.2, embedder.close).start()
    with pytest.raises(Cancelled):
        embedder.embed_query("cook", timeout=5)


def test_time_spent_by_the_consumer_does_not_count_against_an_attempt(server, connect):
    server.seconds_per_request = 0.2
    for _ in connect(attempt_timeout=0.4, request_items=4).embed(TEXTS, stop=Stop()):
        time.sleep(0.6)
    assert server.sizes == [4, 4]


# --- queries


@pytest.mark.parametrize(
    ("identity", "options", "sent"),
    [
        ("intfloat/multilingual-e5-base-chunked-v1", {}, "query: cook"),
        ("BAAI/bge-m3", {}, "cook"),
        ("intfloat/e5-large", {"query_prefix": ""}, "cook"),
        ("fee5fi", {"query_prefix": "search_query: "}, "search_query: cook"),
    ],
)
def test_a_query_gets_the_models_prefix(server, connect, identity, options, sent):
    vector = connect(identity=identity, **options).embed_query("cook", timeout=5)
    assert server.texts == [sent]
    np.testing.assert_array_equal(vector, vector_for(sent, 8))


def test_a_query_waits_no_longer_than_it_is_told(server, connect):
    server.always = "hang"
    began = time.monotonic()
    with pytest.raises(EndpointTrouble) as raised:
        connect().embed_query("cook", timeout=0.2)
    assert raised.value.code == "timeout"
    assert time.monotonic() - began < 0.5
    time.sleep(0.1)
    assert server.dropped == 1


@pytest.mark.parametrize(
    ("status", "error"), [(401, EndpointTrouble), (502, EndpointTrouble), (500, EndpointTrouble), (400, InputRejected)]
)
def test_a_query_fails_with_a_classified_error(server, connect, status, error):
    server.always = status
    with pytest.raises(error):
        connect().embed_query("cook", timeout=5)


def test_a_blank_query_is_not_sent(server, connect):
    with pytest.raises(InputRejected):
        connect().embed_query("  ", timeout=5)
    assert server.requests == []


# --- settings


def test_tei_without_an_address_means_the_local_one():
    assert "http://127.0.0.1:8090/embed" in repr(HttpEmbedder("tei", None, identity="stub-v1"))


@pytest.mark.parametrize(
    ("protocol", "url", "options"),
    [
        ("grpc", "http://x/", {}),
        ("hf", None, {}),
        ("openai", "http://x/", {}),
        ("tei", "ftp://x/embed", {}),
        ("tei", "http://", {}),
        ("tei", "http://x:abc/", {}),
        ("tei", None, {"proxy": "gopher://x"}),
        ("tei", "https://x/embed", {"ca_bundle": "/nowhere.pem"}),
    ],
)
def test_settings_that_cannot_work_are_refused(protocol, url, options):
    with pytest.raises(ConfigurationError):
        HttpEmbedder(protocol, url, identity="stub-v1", **options)


def test_shortened_vectors_are_asked_for_where_that_is_wanted(server, connect):
    embed(connect("openai", send_dimensions=True), ["a"])
    assert server.requests[0].body["dimensions"] == 8


# --- recorded answers of real servers


def test_a_recorded_answer_of_openai_is_read():
    recording = DATA / "openai/embeddings_3-small_multiple_custom_dimensions.yml"
    if not recording.exists():
        pytest.skip("the recordings are not here")
    content = re.search(r"string: '(\{\"object\":\"list\".*\})'$", recording.read_text(), re.M)
    assert content
    answer = OpenAI("text-embedding-3-small").answer(content[1].encode(), 3, {})
    assert answer.vectors.shape == (3, 768)
    assert (answer.tokens, answer.model) == (3, "text-embedding-3-small")
    np.testing.assert_allclose(np.linalg.norm(answer.vectors, axis=1), 1, atol=1e-3)


def test_the_recorded_errors_of_tei_are_understood():
    recording = DATA / "tei/tei-errors-derived.json"
    if not recording.exists():
        pytest.skip("the recordings are not here")
    examples = orjson.loads(recording.read_bytes())["examples"]
    faults = {}
    for one in examples:
        if isinstance(one["status"], int):
            words = one.get("body_text") or orjson.dumps(one.get("body", "")).decode()
            faults[words] = from_status(one["status"], {}, words.encode())
    batch = [fault for words, fault in faults.items() if "batch size" in words]
    assert batch
    assert all((fault.size, fault.limit, fault.certain) == ("items", 32, True) for fault in batch)
    long = [fault for words, fault in faults.items() if "less than" in words]
    assert long
    assert all(fault.text_error is InputTooLong and fault.certain for fault in long)
    assert [fault.size for words, fault in faults.items() if "length limit" in words] == ["bytes"]
    assert [fault.error_class for words, fault in faults.items() if "overloaded" in words] == ["rate_limited"]


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("batch size 33 > maximum allowed batch size 32", 32),
        ("batch size is invalid, it should not be larger than 10.: input.contents", 10),
        ("Invalid 'input': array too long. Expected an array with maximum length 2048, but got 4000", 2048),
        ("This model's maximum context length is 8192 tokens, however you requested 9000", None),
    ],
)
def test_the_limit_is_read_from_what_servers_say(words, limit):
    assert from_status(400, {}, words.encode()).limit == limit


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[[0.1, 0.2], [0.3, NaN]]", "not_finite"),
        (b"[[0.1, 0.2], [0.3, ", "invalid_json"),
        (b"", "invalid_json"),
        (b"null", "unknown_shape"),
        (b'{"error": "x"}', "unknown_shape"),
        (b"[0.1, 0.2]", "not_numbers"),
        (b"[[true, false], [true, true]]", "not_numbers"),
        (b"[[0.1, 0.2], [true, 0.3]]", "not_numbers"),
        (b'[["1", "2"], ["3", "4"]]', "not_numbers"),
        (b"[[[1], [2]], [[3], [4]]]", "not_numbers"),
        (b"[[0.1, 0.2], [1e-40, 0.0]]", "zero_vector"),
        (b"[[0.1, 0.2], [1e30, 0.0]]", "not_finite"),
        (b"[[0.1, 0.2], {}]", "ragged_vectors"),
        (b"[[], []]", "empty_vector"),
    ],
)
def test_an_answer_against_the_contract_is_named(content, code):
    with pytest.raises(BadAnswer) as raised:
        Tei().answer(content, 2, {})
    assert raised.value.code == code


def test_no_message_quotes_the_server(server, connect):
    server.poison = {"BAD": (400, {}, {"error": "cannot embed 'BAD secret salary'"})}
    _, errors = embed(connect(), [*TEXTS, "BAD secret salary"])
    assert "secret" not in str(errors[8])
    assert isinstance(Rejected([8], errors[8]).error, InputRejected)
    assert wire("tei").default_url
