"""Does cutting lose? Recall of questions whose one document is known, by chunks and by whole texts.

`make bench-retrieval`

Both sides use the local model and exact cosine distance; a document's distance is that of its nearest chunk. The
questions of GermanQuAD are expected in ../shared/data/retrieval/germanquad (BEIR's form: corpus.jsonl, queries.jsonl,
qrels/test.tsv) or in the folder given.

python -m bench.retrieval [FOLDER] [--documents N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embed_assets import Plain, TableCorpus
from embed_assets.embedding import Embedded, LocalEmbedder
from embed_assets.embedding.types import Vectors
from embed_assets.models import SourceRow
from embed_assets.stop import Stop

FOLDER = Path(__file__).resolve().parents[2] / "shared/data/retrieval/germanquad"
WHOLE = 1_000_000  # characters: nothing is cut
AT = 10


@dataclass(frozen=True)
class Questions:
    """Documents, and questions with the number of the document that answers each."""

    documents: list[str]
    questions: list[str]
    answers: list[int]


def load(folder: Path, documents: int) -> Questions:
    """The first documents, and the questions about them."""
    corpus = {row["_id"]: row["text"] for row in _lines(folder / "corpus.jsonl")[:documents]}
    numbers = {name: number for number, name in enumerate(corpus)}
    texts = {row["_id"]: row["text"] for row in _lines(folder / "queries.jsonl")}
    pairs = [line.split("\t")[:2] for line in (folder / "qrels/test.tsv").read_text().splitlines()[1:]]
    asked = [(texts[question], numbers[answer]) for question, answer in pairs if answer in numbers]
    return Questions(list(corpus.values()), [text for text, _ in asked], [answer for _, answer in asked])


def recall(embedder: LocalEmbedder, given: Questions, asked: Vectors, max_chars: int) -> tuple[float, float, int]:
    """Recall at 10, mean reciprocal rank within 10, and how many texts were embedded."""
    owners, texts = chunks(given.documents, max_chars)
    near = asked @ vectors(embedder, texts).T
    best = np.full((len(asked), len(given.documents)), -2.0, dtype=np.float32)
    for chunk, owner in enumerate(owners):
        best[:, owner] = np.maximum(best[:, owner], near[:, chunk])
    right = best[np.arange(len(asked)), given.answers]
    ranks = (best > right[:, None]).sum(axis=1)
    found = ranks < AT
    return float(found.mean()), float((found / (ranks + 1)).mean()), len(texts)


def chunks(documents: Sequence[str], max_chars: int) -> tuple[list[int], list[str]]:
    """Whose each text is, and the texts that a drain would send."""
    corpus = TableCorpus(kind="bench", table="bench", key="id", text=Plain("text"), max_chars=min(max_chars, 8000))
    owners, texts = [], []
    for number, text in enumerate(documents):
        row = SourceRow(str(number), False, True, True, False, "r", texts=[text], fields={})
        for chunk in corpus.plan(row, max_chars=max_chars).chunks:
            owners.append(number)
            texts.append(chunk.sent)
    return owners, texts


def vectors(embedder: LocalEmbedder, texts: Sequence[str]) -> Vectors:
    """(n, dims) float32 of length 1."""
    found = np.zeros((len(texts), embedder.dimensions), dtype=np.float32)
    for result in embedder.embed(texts, stop=Stop()):
        assert isinstance(result, Embedded)
        found[result.positions] = result.vectors
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--documents", type=int, default=1_000_000)
    arguments = parser.parse_args()
    given = load(arguments.folder, arguments.documents)
    embedder = LocalEmbedder()
    asked = vectors(embedder, given.questions)
    print(f"{len(given.questions)} questions, {len(given.documents)} documents, {embedder.identity}")
    for name, size in (("whole texts", WHOLE), ("chunks of 2,000", 2000), ("chunks of 1,000", 1000), ("of 500", 500)):
        found, rank, texts = recall(embedder, given, asked, size)
        print(f"{name}: recall@{AT} {found:.3f}, mean reciprocal rank {rank:.3f}, {texts} texts", flush=True)


if __name__ == "__main__":
    main()
