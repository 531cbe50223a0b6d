"""Cleaning and cutting alone: `make bench-text`. Prints rows a second of one core; fails on nothing.

python -m bench.text [FILE COLUMN KIND]   a JSON Lines file of your own; by default the postings of the demo
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import embed_assets
from embed_assets import TableCorpus
from embed_assets.models import SourceRow

DEMO = Path(embed_assets.__file__).parent / "demo/jobs.jsonl"
REAL = Path(__file__).resolve().parents[2] / "shared/data/jobs"
ROUNDS = 7


def bench(path: Path, column: str, kind: str) -> None:
    """From the value of a column to chunks with their hashes."""
    declared = getattr(embed_assets, kind)(column)
    corpus = TableCorpus(kind="bench", table="bench", key="id", text=declared)
    values = [json.loads(line)[column] for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        SourceRow(str(n), False, True, True, False, "r", texts=[value], fields={}) for n, value in enumerate(values)
    ]
    rates = []
    for _ in range(ROUNDS):
        began = time.process_time()
        chunks = sum(len(corpus.plan(row).chunks) for row in rows)
        rates.append(len(rows) / (time.process_time() - began))
    print(
        f"clean and chunk, {path.name}, {kind}: {statistics.median(rates):,.0f} rows/s a core (budget ≥ 1,000), "
        f"{len(rows)} rows, {chunks} chunks, {sum(len(value or '') for value in values):,} characters"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("column", nargs="?", default="description")
    parser.add_argument("kind", nargs="?", default="Html", choices=["Plain", "Html", "EscapedHtml", "Markdown"])
    given = parser.parse_args()
    if given.file:
        bench(given.file, given.column, given.kind)
        return
    bench(DEMO, "description", "Html")
    if REAL.exists():
        bench(REAL / "ashby-multilingual.jsonl", "descriptionHtml", "Html")
        bench(REAL / "uber-markdown.jsonl", "description", "Markdown")


if __name__ == "__main__":
    main()
