"""The queue with one guard removed, one at a time. The machine is worth what it notices: each must break a law.

A mutant replaces texts of one named statement as it is loaded; no file is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from embed_assets import queries


@dataclass(frozen=True)
class Mutant:
    """`changes`: (old, new) in the statement `query`; each old text stands there, else the mutant is out of date."""

    name: str
    query: str
    changes: tuple[tuple[str, str], ...]

    def mutate(self, text: str) -> str:
        for old, new in self.changes:
            assert old in text, f"mutant '{self.name}' is out of date: {self.query} holds no {old!r}"
            text = text.replace(old, new)
        return text

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = queries.text
        mutated = self.mutate(original(self.query))
        with patch.object(queries, "text", lambda name: mutated if name == self.query else original(name)):
            yield


def _mutant(name: str, query: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, query, changes)


NO_TOKEN = ("w.token = %(token)s", "%(token)s IS NOT NULL")
NEW_VECTORS = ("l.staged_at > n.requested_at", "TRUE")

MUTANTS = [
    # The fence
    _mutant("the fence believes any token", "outbox.fence", NO_TOKEN),
    _mutant("the fence lets an expired wave through", "outbox.fence", ("AND w.lease_until > clock_timestamp()", "")),
    _mutant("the fence lets a closed wave through", "outbox.fence", ("w.closed_at IS NULL AND", "")),
    _mutant("start believes any token", "outbox.start", ("token = %(token)s", "%(token)s IS NOT NULL")),
    _mutant("start begins an expired wave", "outbox.start", (" AND lease_until > clock_timestamp()", "")),
    _mutant("renewal revives an expired wave", "outbox.renew", ("AND w.lease_until > clock_timestamp()\n", "\n")),
    _mutant("release believes any token", "outbox.hold_wave", NO_TOKEN),
    _mutant("release closes a closed wave again", "outbox.hold_wave", (" AND w.closed_at IS NULL", "")),
    # Claim and heal
    _mutant("nobody reaps", "claim.reap", ("w.closed_at IS NULL AND", "FALSE AND")),
    _mutant("nobody heals", "claim.heal", ("o.status = 'leased' {of_scope}", "FALSE {of_scope}")),
    _mutant("waves that had not begun charge crashes", "claim.heal", ("(w.started_at IS NOT NULL)", "TRUE")),
    _mutant("entries of the living are taken back", "claim.heal", ("w.outcome = 'expired' AND", "")),
    _mutant("the third crash does not kill", "claim.heal", (">= %(max_crashes)s", "> %(max_crashes)s")),
    _mutant("deaths by crash are not logged", "claim.heal", ("WHERE h.status = 'dead'", "WHERE FALSE")),
    _mutant("retries do not wait", "claim.due", ("AND o.next_attempt_at <= (SELECT clock_timestamp())", "")),
    _mutant("suspects go with the others", "claim.due", ("AND o.crashes < 2 AND o.timeouts < 2", "")),
    _mutant("a scope takes the whole wave", "claim.due", ("HAVING count(*) >", "HAVING count(*) * 0 >")),
    _mutant("suspects are never claimed", "claim.suspect", ("(o.crashes >= 2 OR o.timeouts >= 2)", "FALSE")),
    _mutant("a claimed entry stays as it was", "claim.lease", ("SET status = 'leased', wave_id", "SET wave_id")),
    # Load and plan
    _mutant(
        "a stamp of any revision supersedes",
        "chunks.load",
        ("AND s.revision IS NOT DISTINCT FROM source.revision AS", "AS"),
    ),
    _mutant(
        "old vectors are not missed by the forced",
        "chunks.missing",
        ("(NOT p.forced OR l.staged_at > p.requested_at)", "TRUE"),
    ),
    _mutant("a first plan is kept beside the second", "chunks.unplan", ("wave_id = %(wave_id)s", "FALSE")),
    # Write
    _mutant("a lost plan is zero chunks", "chunks.requeue_unplanned", ("AND NOT EXISTS", "AND FALSE AND NOT EXISTS")),
    _mutant("short rows are written", "chunks.upsert_chunks", ("WHERE r.embedding IS NULL", "WHERE FALSE")),
    _mutant(
        "short rows are left out and called done",
        "chunks.upsert_chunks",
        ("SET status = 'pending'", "SET status = o.status"),
    ),
    _mutant("the forced accept old vectors", "chunks.upsert_chunks", NEW_VECTORS),
    _mutant("the forced keep what they have", "chunks.upsert_chunks", ("p.forced OR old.text_hash", "old.text_hash")),
    _mutant("positions beyond the new count stay", "chunks.delete_chunks", ("c.chunk_index >= p.chunk_count", "FALSE")),
    _mutant("cleared rows keep their chunks", "chunks.delete_chunks", ("p.action IN ('clear', 'gone')", "FALSE")),
    _mutant("cleared rows keep their stamp", "chunks.unstamp", ("p.action IN ('clear', 'gone')", "FALSE")),
    _mutant(
        "the stamp says the revision of now",
        "chunks.stamp",
        (
            "p.revision, p.chunk_count",
            "coalesce((SELECT r.revision FROM {source} AS r WHERE r.key = {p_key}), p.revision), p.chunk_count",
        ),
    ),
    _mutant(
        "the source is not looked at again",
        "chunks.settle",
        ("ELSE source.indexable IS NOT TRUE OR source.revision IS DISTINCT FROM p.revision", "ELSE FALSE"),
    ),
    _mutant("a reopened row is cleared for good", "chunks.settle", ("THEN source.indexable IS TRUE", "THEN FALSE")),
    _mutant("a request meanwhile is ignored", "chunks.settle", ("p.requested_at > %(claimed_at)s AS", "FALSE AS")),
    _mutant(
        "a request meanwhile loses its force",
        "chunks.settle",
        ("status = 'pending',\n        attempts = 0", "status = 'pending', forced = FALSE,\n        attempts = 0"),
    ),
    _mutant(
        "finished entries are not logged",
        "chunks.settle",
        ("ON d.action = 'embed'\n    ORDER BY d.source_id", "ON d.action = 'embed' WHERE FALSE"),
    ),
    _mutant("any token is told that its wave is written", "outbox.wave_counts", NO_TOKEN),
    # Fail and release
    _mutant(
        "an outdated failure is charged",
        "outbox.fail",
        ("AND o.requested_at <= %(claimed_at)s", ""),
        ("AND o.requested_at > %(claimed_at)s", "AND FALSE"),
    ),
    _mutant(
        "failures charge whoever holds the row now",
        "outbox.fail",
        ("AND o.wave_id = %(wave_id)s AND o.status = 'leased'", ""),
    ),
    _mutant("deterministic failures are retried", "outbox.fail", ("g.deterministic OR", "")),
    _mutant("attempts never end", "outbox.fail", (">= %(max_attempts)s", "> %(max_attempts)s + 1")),
    _mutant(
        "a release is charged",
        "outbox.release_entries",
        ("timeouts = o.timeouts + mine.timed_out::integer", "timeouts = o.timeouts + 1"),
    ),
    _mutant("a slow wave is a timed-out wave", "outbox.release_entries", (" AND w.texts = 0", "")),
    # Enqueue
    _mutant(
        "a request is as old as its announcement",
        "enqueue.fold",
        ("lane, scope, request\n)", "lane, scope, request, at\n)"),
        ("max(t.scope) AS scope", "max(t.scope) AS scope, min(t.at) AS at"),
        ("forced, request)", "forced, request, requested_at)"),
        ("e.forced, e.request", "e.forced, e.request, e.at"),
        ("requested_at = clock_timestamp()", "requested_at = excluded.requested_at"),
    ),
    _mutant(
        "a fold takes leased entries from their wave",
        "enqueue.fold",
        ("CASE o.status WHEN 'leased' THEN 'leased' ELSE 'pending' END", "'pending'"),
    ),
    _mutant(
        "a request does not revive the dead",
        "enqueue.fold",
        ("CASE o.status WHEN 'leased' THEN 'leased' ELSE 'pending' END", "o.status"),
    ),
    _mutant(
        "the last request decides about force",
        "enqueue.fold",
        ("forced = o.forced OR excluded.forced", "forced = excluded.forced"),
    ),
    _mutant("a repeated request is not the newest", "enqueue.fold", ("requested_at = clock_timestamp(),\n", "\n")),
    _mutant(
        "a scan sees no new revision",
        "enqueue.scan_range",
        ("s.source_id IS NULL OR s.revision IS DISTINCT FROM r.revision AS", "s.source_id IS NULL AS"),
    ),
    _mutant("a scan enters what is not indexable", "enqueue.scan_range", ("j.indexable AND j.stale", "j.stale")),
    _mutant(
        "a scan merges into the backlog",
        "enqueue.scan_range",
        ("AND NOT EXISTS", "AND TRUE OR NOT EXISTS"),
        ("DO NOTHING", "DO UPDATE SET status = 'pending'"),
    ),
    _mutant("a scan clears nothing", "enqueue.clear_range", ("found.indexable IS NOT TRUE", "FALSE")),
    _mutant(
        "a scan revives the dead that did not change",
        "enqueue.revive_changed",
        (" AND e.revision IS DISTINCT FROM source.revision", ""),
    ),
    _mutant(
        "the dead whose source is gone stay", "enqueue.revive_changed", ("source.indexable IS NOT TRUE\n", "FALSE\n")
    ),
    _mutant("pruned rows are not noticed", "enqueue.unstamp_short", ("c.present <> c.chunk_count", "FALSE")),
    _mutant("the dismissed are revived", "enqueue.revive_parked", ("AND e.dismissed_at IS NULL", "")),
    _mutant(
        "chunks without a stamp are not noticed",
        "enqueue.enter_unstamped",
        ("WHERE\n    EXISTS", "WHERE FALSE AND EXISTS"),
    ),
    # Operator
    _mutant("a paused kind is claimed from", "corpus.corpus", ("c.paused_at", "NULL::timestamptz AS paused_at")),
    _mutant("a retry takes the dismissed", "operate.retry_dead", ("AND e.dismissed_at IS NULL", "")),
    _mutant(
        "status forgets the stamps that are left over", "status.status", ("AND NOT EXISTS", "AND FALSE AND NOT EXISTS")
    ),
]

# Caught within a few dozen steps: what every test run can afford.
QUICK = (
    "the fence believes any token",
    "a request meanwhile is ignored",
    "short rows are left out and called done",
)
