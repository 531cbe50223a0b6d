"""The benches that need no database, a short round of each."""

from __future__ import annotations

import json
import sys

from bench import retrieval, text


def lines(*rows: dict[str, str]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_text_bench_reads_a_file_of_ones_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines({"body": "# Title\n\ntext"}, {"body": "more"}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["text", str(path), "body", "Markdown"])
    text.main()
    assert "2 rows, 2 chunks, 17 characters" in capsys.readouterr().out


def test_the_retrieval_bench_finds_what_questions_are_about(tmp_path, monkeypatch, capsys):
    filler = "Das Wetter bleibt heute wechselhaft und kühl. " * 60
    documents = {"d1": "Der Bäcker backt morgens Brot.", "d2": "Die Katze schläft auf dem Sofa.", "d3": filler}
    (tmp_path / "corpus.jsonl").write_text(lines(*({"_id": name, "text": t} for name, t in documents.items())))
    (tmp_path / "queries.jsonl").write_text(lines({"_id": "q1", "text": "Wer backt Brot?"}, {"_id": "q2", "text": "?"}))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td9\t1\n")
    monkeypatch.setattr(sys, "argv", ["retrieval", str(tmp_path)])
    retrieval.main()
    out = capsys.readouterr().out
    assert "1 questions, 3 documents" in out
    assert "whole texts: recall@10 1.000, mean reciprocal rank 1.000, 3 texts" in out
    assert "chunks of 2,000: recall@10 1.000, mean reciprocal rank 1.000, 4 texts" in out
