"""The embedder in this process: one space, one loading, and it stops between batches."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from embed_assets.embedding import LocalEmbedder, local
from embed_assets.errors import AnswerContract, Cancelled, InputRejected, WaveTimeout
from embed_assets.stop import Stop

TEXTS = [f"We look for a nurse for ward {n}." for n in range(40)]


def test_vectors_are_512_wide_and_of_length_one_in_batches_of_32():
    results = list(LocalEmbedder().embed(TEXTS, stop=Stop()))
    assert [result.positions for result in results] == [list(range(32)), list(range(32, 40))]
    vectors = np.concatenate([result.vectors for result in results])
    assert (vectors.shape, vectors.dtype) == ((40, 512), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)


def test_a_text_has_the_same_vector_in_any_company():
    alone = LocalEmbedder().embed_query(TEXTS[3], timeout=5)
    [together, *_] = LocalEmbedder().embed(TEXTS, stop=Stop())
    np.testing.assert_allclose(together.vectors[3], alone, atol=1e-5)
    assert alone.shape == (512,)


def test_meaning_is_near_across_languages():
    embedder = LocalEmbedder()
    nurse, krankenpfleger, welder = (
        embedder.embed_query(text, timeout=5) for text in ("nurse", "Krankenpfleger", "steel welder")
    )
    assert nurse @ krankenpfleger > nurse @ welder


def test_blank_texts_are_rejected_and_the_others_embedded():
    rejected, embedded = LocalEmbedder().embed(["a", " ", "b"], stop=Stop())
    assert rejected.positions == [1]
    assert isinstance(rejected.error, InputRejected)
    assert embedded.positions == [0, 2]
    with pytest.raises(InputRejected):
        LocalEmbedder().embed_query("", timeout=5)


@pytest.mark.ids("E24")
def test_a_bare_string_is_refused():
    with pytest.raises(TypeError):
        LocalEmbedder().embed("document", stop=Stop())


@pytest.mark.ids("A-29")
def test_a_stop_is_seen_between_slices(monkeypatch):
    stop, encoded = Stop(), []

    class Model:
        def encode(self, texts):
            encoded.extend(texts)
            if len(encoded) >= 36:
                stop.cancel()
            return np.ones((len(texts), 512), np.float32)

    monkeypatch.setattr(local, "load_model", Model)
    results = LocalEmbedder().embed(TEXTS, stop=stop)
    assert next(results).positions == list(range(32))
    with pytest.raises(Cancelled):
        next(results)
    assert len(encoded) == 36


def test_a_used_up_budget_ends_before_the_first_text(monkeypatch):
    monkeypatch.setattr(local, "load_model", lambda: pytest.fail("worked on"))
    with pytest.raises(WaveTimeout):
        list(LocalEmbedder().embed(TEXTS, stop=Stop(seconds=1e-9)))


@pytest.mark.ids("E22")
def test_a_vector_that_cannot_be_compared_is_never_handed_out(monkeypatch):
    class Model:
        def encode(self, texts):
            return np.zeros((len(texts), 512), np.float32)

    monkeypatch.setattr(local, "load_model", Model)
    with pytest.raises(AnswerContract):
        LocalEmbedder().embed_query("a", timeout=5)


def test_the_model_is_loaded_once_however_many_threads_ask():
    models, vectors = [], []

    def work():
        models.append(local.load_model())
        vectors.append(LocalEmbedder().embed_query("nurse", timeout=5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 4
    assert all(model is models[0] for model in models)
    assert all((vector == vectors[0]).all() for vector in vectors)
