"""What the asset checks find out about one kind: each a number held against what it should be, and what to do.

Reads only, bounded, needs no embedder. What does not belong here: Dagster (`defs/checks.py`), the word that sums it up
(`verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from psycopg import errors

from embed_assets.errors import DatabaseTrouble
from embed_assets.queries import query
from embed_assets.resources.model_gates import Model
from embed_assets.resources.operating import Operating
from embed_assets.resources.operator import Operator
from embed_assets.resources.outbox import BACKLOG_LIMIT, Outbox
from embed_assets.resources.postgres import Row
from embed_assets.resources.similar_store import SimilarStore
from embed_assets.resources.verdict import Facts, State, Verdict, facts_of, verdict
from embed_assets.stop import Stop

LOOK_SECONDS = 10
SAMPLED = 500
MENDED_VECTOR = (0, 8, 4)
SNAPSHOT_SECONDS = 900.0
SNAPSHOT_AGE = 10_000_000
RECALL_QUERIES = 20
RECALL_SECONDS = 15.0


@dataclass(frozen=True)
class Finding:
    """`error`: of a red one, that somebody must act, not only look. `advice`: what to do, of a red one."""

    passed: bool
    text: str
    advice: str = ""
    error: bool = False
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    table: Sequence[Mapping[str, str | int]] = ()


class Health:
    """The looks at one kind. Each method is one check of the same name."""

    def __init__(self, kind: Operating) -> None:
        self._kind = kind
        self._postgres = kind.postgres
        self._settings = kind.settings

    @cached_property
    def _models(self) -> list[Model]:
        """The active model first, then the one that is built."""
        return sorted((m for m in self._kind.life.models() if m.active or m.target), key=lambda m: not m.active)

    def verdict(self) -> Finding:
        """The word about the kind: red when DEGRADED."""
        found, facts = self.judged()
        numbers = {"work": facts.work, "failed": facts.failed, "succeeded": facts.succeeded, "state": found.state.value}
        advice = "See the other checks: dead_letters says what failed and what to do, oldest_due whether work goes on."
        if facts.frozen_since:
            advice = "Set EMBED_ACTIVE_* to keep what search reads fresh, or let the new model be finished."
        return Finding(found.state is not State.DEGRADED, found.reason, advice, facts.stalled, numbers)

    def judged(self) -> tuple[Verdict, Facts]:
        """With every row counted where that can be done in time, else from what is known at once."""
        if not self._models:
            return verdict(Facts(0, 0, 0)), Facts(0, 0, 0)
        target = self._models[-1]
        frozen = self._kind.life.standing(self._maintained()).frozen_since
        try:
            counts = Outbox(self._postgres, self._kind.bound, [target.model_id]).status(target.identity).counts
            facts = facts_of(counts, stamped=target.stamped, frozen_since=frozen)
        except (errors.QueryCanceled, DatabaseTrouble):
            facts = self.facts_at_once()
        return verdict(facts), facts

    def facts_at_once(self) -> Facts:
        """By index, whatever the size: nobody counts what is searchable. Each count ends at 10,000."""
        ids = [model.model_id for model in self._models]
        backlog = Outbox(
            self._postgres, self._kind.bound, ids, reconcile_seconds=self._settings.reconcile_seconds
        ).backlog()
        # Failures are counted to twice the limit (dead, waiting): with more rows than that, nothing is called stalled.
        held = self._row("stamps", model_id=ids[-1] if ids else 0, limit=2 * BACKLOG_LIMIT + 1)["rows"]
        return Facts(
            work=backlog.work + backlog.leased + backlog.waiting,
            failed=backlog.dead + backlog.waiting,
            succeeded=held,
            frozen_since=self._kind.life.standing(self._maintained()).frozen_since if ids else None,
        )

    def _maintained(self) -> list[int]:
        """The target, and the active model where the settings name its embedder."""
        models = self._models if self._settings.of_active() else self._models[-1:]
        return [model.model_id for model in models]

    def dead_letters(self) -> Finding:
        """Rows that failed for good, by code."""
        groups = Operator(self._postgres, self._kind.kind).dead_letters()
        rows = sum(group.rows for group in groups)
        advice = "Do what the table says, then run the job retry_dead_letters (or dismiss_dead_letters) with that code."
        text = f"{rows} rows failed for good, of {len(groups)} codes" if rows else "no dead letter"
        return Finding(
            not rows, text, advice, True, {"rows_dead": rows, "codes": len(groups)}, [g.shown for g in groups]
        )

    def oldest_due(self) -> Finding:
        """How long the oldest change waits, against EMBED_FRESH_SECONDS."""
        row = self._row("oldest_due")
        seconds = max(row["entry_seconds"] or 0.0, row["feed_seconds"] or 0.0)
        allowed = self._settings.fresh_seconds
        advice = (
            "The kind is paused: run the job resume."
            if row["paused"]
            else "See the sensor's last tick for why no drain starts, the drain's last run for why it fails, and "
            "whether the endpoint rests; with a steady backlog raise EMBED_CONCURRENCY or EMBED_DRAINS_IN_FLIGHT."
        )
        numbers = {"oldest_due_seconds": round(seconds, 1), "allowed_seconds": allowed}
        text = f"the oldest change waits for {seconds:.0f} s, {allowed:.0f} s are allowed"
        return Finding(seconds <= allowed, text, advice, seconds > 4 * allowed, numbers)

    def expired_leases(self) -> Finding:
        """Waves whose process vanished, which nobody has taken back."""
        row = self._row("leases")
        numbers = {name: row[name] for name in ("held", "expired")}
        numbers["oldest_seconds"] = round(row["oldest_seconds"], 1)
        text = f"{row['held']} leases are held, {row['expired']} ran out"
        advice = (
            "The next drain takes them back. Does one start? See the sensor's last tick. The job release_waves takes "
            "them back at once."
        )
        return Finding(row["oldest_seconds"] <= self._settings.lease_seconds, text, advice, False, numbers)

    def stamps_match_chunks(self) -> Finding:
        """Whether rows that are said to be embedded have all their chunks, in a sample."""
        sampled = wrong = 0
        for model in self._models:
            row = self._sampled_stamps(model)
            sampled, wrong = sampled + row["sampled"], wrong + row["wrong"]
        text = f"of {sampled} rows sampled, {wrong} lack chunks or have too many"
        advice = "Chunk rows were deleted or restored by somebody else. Run the job maintenance: it finds all of them."
        return Finding(not wrong, text, advice, True, {"rows_sampled": sampled, "rows_wrong": wrong})

    def _sampled_stamps(self, model: Model) -> Row:
        percent = min(100.0, 100.0 * SAMPLED / self._row("stamps_estimate")["rows"])
        ids = {"model_id": model.model_id, "percent": percent}
        start = self._rows("random_stamp", **ids)
        names = self._kind.bound.fragments(model.model_id, partition=self._kind.bound.partition(model.model_id))
        values = {"kind": self._kind.kind, "from": start[0]["source_id"] if start else "", "size": SAMPLED}
        with self._postgres.transaction() as cursor:
            row = cursor.execute(query("checks.stamps_and_chunks", **names), values).fetchone()
        assert row is not None
        return row

    def one_vector_space(self) -> Finding:
        """Whether each partition holds vectors of its own model alone."""
        faults, sampled = [], 0
        for model in self._models:
            row = self._vectors(model)
            sampled += row["sampled"]
            if row["checks"] < 2:
                faults.append(f"the partition of {model.identity} lost its CHECK constraints")
            if row["wrong_width"] or row["wrong_model"]:
                faults.append(f"the partition of {model.identity} holds vectors of another model")
        text = "; ".join(faults) or f"{sampled} vectors sampled, each in its own model's partition"
        advice = "Somebody altered the chunk table. Restore it, or delete the strangers and run the job maintenance."
        return Finding(not faults, text, advice, True, {"vectors_sampled": sampled, "faults": len(faults)})

    def _vectors(self, model: Model) -> Row:
        partition = self._kind.bound.partition(model.model_id)
        with self._postgres.transaction() as cursor:
            values = {
                "name": partition.as_string(cursor),
                "dimensions": model.dimensions,
                "model_id": model.model_id,
                "size": SAMPLED,
            }
            row = cursor.execute(query("checks.vector_space", partition=partition), values).fetchone()
        assert row is not None
        return row

    def pgvector_version(self) -> Finding:
        """pgvector before 0.8.4 damages HNSW indexes under deletes and vacuum."""
        with self._postgres.transaction() as cursor:
            row = cursor.execute(query("session.vector_version")).fetchone()
        version = row["extversion"] if row else "none"
        advice = (
            f'pgvector {version} may damage an HNSW index while rows are replaced and vacuumed ("hnsw graph not '
            'repaired", lost neighbours; mended in 0.8.2 to 0.8.4). Install 0.8.4 or newer, ALTER EXTENSION vector '
            "UPDATE, then REINDEX the indexes that end in _hnsw."
        )
        return Finding(_version(version) >= MENDED_VECTOR, f"pgvector {version}", advice, False, {"version": version})

    def vector_index(self) -> Finding:
        """Whether the index of what search reads stands: not left half built, not dropped."""
        faults = []
        for model in self._models:
            index = self._kind.life.index_of(model)
            state = index.state()
            if index.possible and state.present and not state.valid and not state.building:
                faults.append(f"the index of {model.identity} was left half built")
            elif index.possible and model.index_ready and not state.present:
                faults.append(f"the index of {model.identity} is gone: search reads the whole table")
        text = "; ".join(faults) or "no index is broken"
        advice = f"Run the job {self._kind.kind}_models: it builds the index anew, while people read and write."
        return Finding(not faults, text, advice, True, {"broken": len(faults)})

    def recall(self) -> Finding:
        """Of the ten nearest by exact search, the share that the index finds, in a sample."""
        active = next((model for model in self._models if model.active), None)
        index = self._kind.life.index_of(active) if active else None
        if index is None or not index.possible or not index.state().valid:
            return Finding(True, "there is no index: search is exact", numbers={"queries": 0})
        found = index.recall(queries=RECALL_QUERIES, seconds=RECALL_SECONDS, stop=Stop())
        if found is None:
            return Finding(True, "the index is empty", numbers={"queries": 0})
        allowed = self._settings.switch_recall_percent
        text = f"recall@10 is {found.share:.1%} over {found.queries} queries, {allowed:g} % are wanted"
        advice = "REINDEX INDEX CONCURRENTLY the partition's _hnsw index; if that does not help, raise hnsw.ef_search."
        numbers = {"recall_percent": round(100 * found.share, 2), "queries": found.queries}
        return Finding(100 * found.share >= allowed, text, advice, False, numbers)

    def xmin_age(self) -> Finding:
        """Whether somebody keeps finished rows from being cleaned away, so that every claim slows down."""
        found = self._rows("oldest_snapshot")
        if not found:
            return Finding(True, "no snapshot is held", numbers={"seconds": 0.0, "transactions": 0})
        who = found[0]
        seconds, age = who["seconds"] or 0.0, who["age"] or 0
        text = f"the oldest snapshot is held by {who['what']}, for {seconds:.0f} s and {age} transactions"
        advice = (
            "Nothing deleted since then can be cleaned away, so the queue bloats. End that session "
            "(pg_terminate_backend), finish the prepared transaction, or drop the slot; and see who left it open."
        )
        numbers = {"seconds": round(seconds, 1), "transactions": age}
        return Finding(seconds <= SNAPSHOT_SECONDS and age <= SNAPSHOT_AGE, text, advice, False, numbers)

    def search_feed(self) -> Finding:
        """Whether whoever feeds an external index keeps up."""
        row = self._row("feed", feed="search")
        seconds, allowed = row["seconds"] or 0.0, self._settings.search_feed_seconds
        text = f"{_count(row['rows'])} changes wait for an external index, the oldest for {seconds:.0f} s"
        advice = "See the consumer of search_outbox: it takes embed_assets.search_changes and must acknowledge them."
        numbers = {"changes_waiting": row["rows"], "oldest_seconds": round(seconds, 1)}
        return Finding(allowed is None or seconds <= allowed, text, advice, False, numbers)

    def similar_feed(self) -> Finding:
        """Whether the lists of similar items keep up."""
        if self._kind.bound.corpus.similar is None or not self._models:
            return Finding(True, "no similar items are kept", numbers={"rows_waiting": 0})
        row = self._row("feed", feed="similar")
        seconds = row["seconds"] or 0.0
        if postponed := SimilarStore(self._postgres, self._kind.bound).postponed():
            return Finding(True, f"postponed: {postponed}", numbers={"rows_waiting": row["rows"]})
        text = f"{_count(row['rows'])} rows wait for their neighbours, the oldest for {seconds:.0f} s"
        advice = f"See the last tick of the sensor {self._kind.kind}_similar and the last run of the job of that name."
        numbers = {"rows_waiting": row["rows"], "oldest_seconds": round(seconds, 1)}
        return Finding(seconds <= self._settings.fresh_seconds, text, advice, False, numbers)

    def _rows(self, name: str, **values: Any) -> list[Row]:
        with self._postgres.transaction() as cursor:
            return cursor.execute(query(f"checks.{name}"), {"kind": self._kind.kind, **values}).fetchall()

    def _row(self, name: str, **values: Any) -> Row:
        return self._rows(name, **values)[0]


Look = Callable[[Health], Finding]
LOOKS: dict[str, Look] = {
    look.__name__: look
    for look in (
        Health.verdict,
        Health.dead_letters,
        Health.oldest_due,
        Health.expired_leases,
        Health.stamps_match_chunks,
        Health.one_vector_space,
        Health.pgvector_version,
        Health.vector_index,
        Health.recall,
        Health.xmin_age,
        Health.search_feed,
        Health.similar_feed,
    )
}


def look(health: Health, name: str) -> Finding:
    """One check; red without numbers where the database did not answer in time."""
    try:
        return LOOKS[name](health)
    except (errors.QueryCanceled, DatabaseTrouble):
        return Finding(
            False,
            f"could not be looked at within {LOOK_SECONDS} s",
            "The database is busy, or the table large: look again later; if it stays so, see pg_stat_activity.",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _count(number: int) -> str:
    return f"{number}+" if number >= BACKLOG_LIMIT else str(number)
