"""What was asked for, and for which models: whoever folds, whatever is retired meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    ENTRIES,
    Db,
    drain,
    enqueue,
    fold,
    rows,
    say,
    value,
)

from embed_assets.errors import ConfigurationError
from embed_assets.resources.assembly import Kind
from embed_assets.resources.enqueuer import _Enqueue


def test_a_worker_whose_models_were_retired_since_does_not_ask_for_scans_of_them(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    assert not beside.outbox.stale()
    beside.life.switch()
    db.execute("UPDATE jobs SET description = 'changed'")
    assert not kind.outbox.stale(), "its only model is retired"
    assert beside.outbox.stale()
    drain(make_kind(embedder=wide))
    assert not beside.outbox.stale()


def ask(kind: Kind) -> None:
    kind.backfill.ask(range(64), selection="all", reason="test", run_id="run")


def done(kind: Kind) -> set[bool]:
    """Whether the buckets that have rows are done."""
    return {one.done for one in kind.backfill.progress() if one.rows}


def test_a_backfill_is_entered_for_the_models_it_was_asked_for_whoever_folds_it(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    drain(beside)
    for one in (wide, embedder):
        one.texts.clear()
    ask(beside)
    fold(kind)
    assert rows(db, ENTRIES) == [(kind.model_id, 6), (beside.model_id, 6)]
    drain(kind)
    assert done(beside) == {False}
    drain(beside)
    assert (len(embedder.texts), len(wide.texts), done(beside)) == (6, 6, {True})


def test_a_backfill_of_the_new_model_leaves_the_frozen_one_alone(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    new = make_kind(embedder=wide)
    ask(new)
    fold(kind)
    assert rows(db, ENTRIES) == [(beside.model_id, 6)]
    drain(new)
    assert done(new) == {True}


def test_what_is_forced_by_hand_is_entered_for_every_model_and_a_change_for_those_of_who_folds(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    forced, changed = rows(db, "SELECT id FROM jobs ORDER BY id LIMIT 2")
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (changed,))
    say(db, forced, forced=True)
    say(db, changed)
    fold(kind)
    assert rows(db, "SELECT source_id::bigint, model_id, forced FROM embed_assets.semantic_outbox ORDER BY 1, 2") == [
        (forced, kind.model_id, True),
        (forced, beside.model_id, True),
        (changed, kind.model_id, False),
    ]
    assert make_kind(embedder=wide).outbox.stale(), "its scan finds what changed"


def test_nothing_is_entered_for_a_model_that_is_retired_while_rows_are_being_entered(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch, wide: HashEmbedder
) -> None:
    drain(beside)
    ask(beside)
    say(db, value(db, "SELECT max(id) FROM jobs"))
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = (SELECT min(id) FROM jobs)")
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = (SELECT min(id) + 1 FROM jobs)")
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = clock_timestamp()")
    begin = _Enqueue.fold

    def switching(self: Any) -> None:
        monkeypatch.setattr(_Enqueue, "fold", begin)
        assert set(self.models) == {kind.model_id, beside.model_id}
        beside.life.switch(force=True)
        begin(self)

    monkeypatch.setattr(_Enqueue, "fold", switching)
    enqueue(beside)
    assert rows(db, ENTRIES) == [(beside.model_id, 6)]
    drain(beside)
    assert done(beside) == {True}


def test_entries_of_a_retired_model_leave_with_a_reconcile(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    beside.life.switch()
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason) "
        "VALUES ('jobs', '1', %s, 'write')",
        (kind.model_id,),
    )
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")
    enqueue(beside)
    assert rows(db, ENTRIES) == []
    assert value(db, "SELECT outcome FROM embed_assets.semantic_outbox_log ORDER BY id DESC") == "superseded"


def test_a_backfill_of_a_model_that_is_given_up_is_never_done(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    new = make_kind(embedder=wide)
    ask(beside)
    drain(beside)
    ask(new)
    fold(new)
    new.life.abandon()
    assert rows(db, ENTRIES) == []
    assert done(kind) == {False}
    with pytest.raises(ConfigurationError, match="are retired"):
        ask(new)
    ask(kind)
    drain(kind)
    assert done(kind) == {True}
