"""The queue of one kind: enqueue, claim, start, fail, release. Each transition is one statement of `outbox.sql`.

What does not belong here: the write that finishes entries (`chunk_store`), the order of the stages (`pipeline`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import Any
from uuid import UUID

from psycopg import Cursor, sql

from embed_assets.errors import RULES, LeaseLost
from embed_assets.models import Backlog, Counts, Entry, Failure, Status, Wave
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row

logger = logging.getLogger(__name__)

MAX_CRASHES = 3
TENTH = 10
RANKED = sql.SQL("o.lane, o.rank, o.id")
REVERSED = sql.SQL("o.lane DESC, o.rank DESC, o.id DESC")
EVER = datetime.max.replace(tzinfo=timezone.utc)
BACKLOG_LIMIT = 10_000


class Outbox:
    """The outbox of one kind for the models that a process maintains, the one whose entries are claimed first first.

    Every method is one short transaction on the database's clock. Raises LeaseLost where the wave's token no
    longer fences, DatabaseTrouble when a transaction could not be had.
    """

    def __init__(
        self,
        postgres: Postgres,
        bound: BoundCorpus,
        models: Sequence[int],
        *,
        lease_seconds: float = 120,
        max_attempts: int = 3,
        reconcile_seconds: float = 3600,
    ) -> None:
        self._postgres = postgres
        self._bound = bound
        self.models = list(models)
        self.lease_seconds = lease_seconds
        self.max_attempts = max_attempts
        self.reconcile_seconds = reconcile_seconds

    @property
    def kind(self) -> str:
        return self._bound.kind

    def now(self) -> datetime:
        """The database's clock."""
        return self._row("status.clock")["now"]  # type: ignore[no-any-return]

    def claim(
        self,
        run_id: str,
        limit: int,
        *,
        failed_before: datetime = EVER,
        ancestors: Sequence[str] = (),
        scope: str | None = None,
    ) -> Wave | None:
        """At most `limit` due entries as one wave, or None. Disjoint from every other claim, waiting for none.

        `failed_before` leaves out what failed since; `ancestors` takes only what waves of these runs left; `scope`
        takes, takes back and buries only entries of this scope.
        Also takes back what expired waves held, so no reaper needs to run.
        """
        values = {
            "kind": self.kind,
            "run_id": run_id,
            "limit": limit,
            "lease": self.lease_seconds,
            "failed_before": failed_before,
            "ancestors": list(ancestors),
            "max_crashes": MAX_CRASHES,
            "scope": scope,
        }
        return self._postgres.retrying(lambda cursor: self._claim(cursor, values))

    def _claim(self, cursor: Cursor[Row], values: dict[str, Any]) -> Wave | None:
        self._recover(cursor, values)
        corpus = cursor.execute(query("corpus.corpus"), values).fetchone()
        if corpus is None or corpus["paused_at"] is not None:
            return None
        cursor.execute(query("claim.by_index"))
        tenth = self._is_tenth(cursor)
        models = self.models[::-1] if tenth else self.models
        for statement in self._claims(tenth, bool(values["ancestors"]), values["scope"]):
            for model_id in models:
                rows = cursor.execute(statement, {**values, "model_id": model_id}).fetchall()
                if rows:
                    return _waves(rows)[0]
        return None

    def recover(self) -> None:
        """Take back what expired waves hold, as the next claim would."""
        values = {"kind": self.kind, "max_crashes": MAX_CRASHES, "scope": None}
        self._postgres.retrying(lambda cursor: self._recover(cursor, values))

    def _recover(self, cursor: Cursor[Row], values: dict[str, Any]) -> None:
        """Reap, then heal: waves before entries, as the lock order wants."""
        scope = values["scope"]
        reap = query("claim.reap", of_scope=_of_scope(scope, "claim.reap_of_scope"))
        expired = [row["wave_id"] for row in cursor.execute(reap, values)]
        if expired:
            logger.warning("%s: the lease of wave %s had run out", self.kind, ", ".join(map(str, expired)))
            cursor.execute(query("outbox.drop_plans"), {"wave_ids": expired})
        cursor.execute(query("claim.heal", of_scope=_of_scope(scope)), values)

    def _is_tenth(self, cursor: Cursor[Row]) -> bool:
        """Every tenth wave goes the other way round (lane, model, rank), so that nothing starves."""
        row = cursor.execute(query("claim.next_wave_number")).fetchone()
        return row is not None and row["number"] % TENTH == 0

    def _claims(self, tenth: bool, of_runs: bool, scope: str | None) -> list[sql.Composed]:
        """The claims to try in turn; suspects come after everything else."""
        parts = {"lease": query("claim.lease"), "of_scope": _of_scope(scope)}
        if of_runs:
            return [query("claim.of_runs", **parts)]
        order = REVERSED if tenth else RANKED
        return [query("claim.due", order=order, **parts), query("claim.suspect", **parts)]

    def claimable(self, *, failed_before: datetime = EVER, scope: str | None = None) -> bool:
        """Whether anything is due now, also what a claim had to skip because it was locked."""
        values = {"kind": self.kind, "models": self.models, "failed_before": failed_before, "scope": scope}
        return bool(self._row("claim.claimable", values, of_scope=_of_scope(scope))["claimable"])

    def waves_of(self, run_id: str) -> list[Wave]:
        """The open waves of a run, for its next stage."""
        with self._postgres.transaction() as cursor:
            values = {"kind": self.kind, "run_id": run_id}
            return _waves(cursor.execute(query("outbox.waves_of_run"), values).fetchall())

    def renew(self, leases: dict[int, UUID]) -> set[int]:
        """Heartbeat of waves by id and token; returns the ids that are refused, whose work must end."""
        values = {"wave_ids": list(leases), "tokens": list(leases.values()), "lease": self.lease_seconds}
        with self._postgres.transaction(lock_timeout="2s") as cursor:
            rows = cursor.execute(query("outbox.renew"), values).fetchall()
        return {row["wave_id"] for row in rows if not (row["renewed"] or row["alive"])}

    def lost(self, leases: dict[int, UUID]) -> set[int]:
        """Of these waves by id and token, those that are no longer held. Renews nothing."""
        values = {"wave_ids": list(leases), "tokens": list(leases.values())}
        with self._postgres.transaction(lock_timeout="2s") as cursor:
            return {row["wave_id"] for row in cursor.execute(query("outbox.lost"), values)}

    def start(self, wave: Wave) -> None:
        """Say that work begins: from now on a lost lease is a crash. Raises LeaseLost."""
        if self._postgres.one("outbox.start", parameters(wave)) is None:
            raise LeaseLost(f"wave {wave.wave_id} is no longer ours")

    def progress(self, wave: Wave, counts: Counts) -> None:
        """Show how far staging is. Of a wave that is no longer ours nothing is shown, and nobody is told."""
        self._postgres.execute("outbox.count_progress", parameters(wave) | counts.as_dict())

    def staged(self, wave: Wave, counts: Counts, *, seconds: float) -> None:
        """Keep what staging cost with the wave."""
        values = counts.as_dict() | {"seconds": seconds}
        self._postgres.retrying(lambda c: c.execute(query("outbox.count_staged"), parameters(wave) | values))

    def fail(self, wave: Wave, failures: Sequence[Failure]) -> Counts:
        """Charge rows of a wave, each by the rule of its error class, in one fenced transaction."""
        return self._postgres.retrying(lambda cursor: self._fail(cursor, wave, failures))

    def _fail(self, cursor: Cursor[Row], wave: Wave, failures: Sequence[Failure]) -> Counts:
        ordered = sorted(failures, key=lambda failure: failure.source_id)
        values = parameters(wave) | {"max_attempts": self.max_attempts, "claimed_at": fence(cursor, wave)}
        values |= {"ids": [failure.source_id for failure in ordered]}
        cursor.execute(query("outbox.lock_entries"), values)
        row = cursor.execute(query("outbox.fail"), values | _columns(ordered)).fetchone()
        assert row is not None
        cursor.execute(query("outbox.count_failures"), values | {name: row[name] for name in ("failed", "dead")})
        return Counts(
            failed=row["failed"] + row["known_failed"], dead=row["dead"] + row["known_dead"], back=row["back"]
        )

    def release(self, wave: Wave, *, timed_out: bool = False) -> Counts:
        """Give the entries back at once, charging nobody. Already closed or taken over: nothing is done.

        `timed_out`: the wave used up its time with nothing staged, which marks its entries.
        """
        return self._postgres.retrying(lambda cursor: self._release(cursor, wave, timed_out))

    def _release(self, cursor: Cursor[Row], wave: Wave, timed_out: bool) -> Counts:
        values = parameters(wave) | {"ids": None, "timed_out": timed_out, "outcome": "released"}
        if cursor.execute(query("outbox.hold_wave"), values).fetchone() is None:
            return Counts()
        cursor.execute(query("outbox.lock_entries"), values)
        row = cursor.execute(query("outbox.release_entries"), values).fetchone()
        dead = row["dead"] if row else 0
        cursor.execute(query("outbox.close_wave"), values | {"dead": dead})
        cursor.execute(query("outbox.drop_plans"), {"wave_ids": [wave.wave_id]})
        return Counts(dead=dead, lost=(row["released"] - dead) if row else 0)

    def release_runs(self, runs: Sequence[str], *, lapsing: Collection[int] = ()) -> int:
        """Release every open wave of these runs but those that are to lapse; returns how many there were."""
        with self._postgres.transaction() as cursor:
            rows = cursor.execute(
                query("outbox.open_waves_of_runs"), {"kind": self.kind, "runs": list(runs)}
            ).fetchall()
        waves = [Wave(**row) for row in rows if row["wave_id"] not in lapsing]
        for wave in waves:
            self.release(wave)
        return len(waves)

    def rows_per_second(self) -> float | None:
        """The recent rate of written waves, or None before there is one."""
        rate = self._row("status.recent_rate", {"kind": self.kind})["rows_per_second"]
        return float(rate) if rate is not None else None

    def backlog(self) -> Backlog:
        """Bounded counts of what asks for a drain. Changes nothing; milliseconds at any size."""
        values = {"kind": self.kind, "models": self.models, "limit": BACKLOG_LIMIT}
        values |= {"reconcile_seconds": self.reconcile_seconds}
        return Backlog(**self._row("status.backlog", values), limit=BACKLOG_LIMIT)

    def stale(self) -> bool:
        """The scan's own predicate: whether a scan would enqueue or revive anything for one of the models.

        Those that were retired since are nobody's business any more, as they are not the scan's.
        """
        statement = query("status.stale_exists", **self._bound.fragments())
        with self._postgres.transaction() as cursor:
            values = {"kind": self.kind, "models": self.models}
            maintained = cursor.execute(query("models.maintained"), values).fetchall()
        for model_id in [row["model_id"] for row in maintained]:
            with self._postgres.transaction() as cursor:
                row = cursor.execute(statement, {"kind": self.kind, "model_id": model_id}).fetchone()
            if row and row["stale"]:
                return True
        return False

    def status(self, identity: str, model_id: int | None = None, *, milliseconds: int | None = None) -> Status:
        """Each source row and each leftover stamp once, by state, for one model: by default the newest of ours.

        Raises QueryCanceled when it takes longer than `milliseconds`.
        """
        statement = query("status.status", **self._bound.fragments())
        with self._postgres.transaction() as cursor:
            if milliseconds is not None:
                cursor.execute(query("portrait.patience"), {"milliseconds": str(milliseconds)})
            values = {"kind": self.kind, "model_id": self.models[-1] if model_id is None else model_id}
            rows = cursor.execute(statement, values).fetchall()
        return Status(self.kind, identity, {row["state"]: row["rows"] for row in rows})

    def _row(self, name: str, values: dict[str, Any] | None = None, **fragments: sql.Composable) -> Row:
        statement = query(name, **fragments)
        row = self._postgres.retrying(lambda cursor: cursor.execute(statement, values or {}).fetchone())
        assert row is not None, name
        return row


def _of_scope(scope: str | None, name: str = "claim.of_scope") -> sql.Composable:
    """The condition that limits a step to one scope; nothing for a run of all."""
    return sql.SQL("") if scope is None else query(name)


def fence(cursor: Cursor[Row], wave: Wave) -> datetime:
    """Hold the wave's row: token, open and unexpired. Returns claimed_at; raises LeaseLost."""
    row = cursor.execute(query("outbox.fence"), parameters(wave)).fetchone()
    if row is None:
        raise LeaseLost(f"wave {wave.wave_id} is no longer ours")
    return row["claimed_at"]  # type: ignore[no-any-return]


def parameters(wave: Wave) -> dict[str, Any]:
    """The wave as query parameters."""
    return {
        "wave_id": wave.wave_id,
        "token": wave.token,
        "kind": wave.kind,
        "model_id": wave.model_id,
        "run_id": wave.run_id,
    }


def _waves(rows: Sequence[Row]) -> list[Wave]:
    waves = []
    for _, group in groupby(rows, key=lambda row: row["wave_id"]):
        entries = [dict(row) for row in group]
        first = {name: entries[0][name] for name in ("wave_id", "token", "kind", "model_id", "run_id", "claimed_at")}
        waves.append(Wave(**first, entries=tuple(Entry(e["entry_id"], e["source_id"], e["forced"]) for e in entries)))
    return waves


def _columns(failures: Sequence[Failure]) -> dict[str, list[Any]]:
    """Failures as columns for unnest. The class's rule decides what a failure costs."""
    return {
        "codes": [failure.error.code for failure in failures],
        "classes": [str(failure.error.error_class) for failure in failures],
        "messages": [str(failure.error) for failure in failures],
        "deterministic": [RULES[failure.error.error_class].deterministic for failure in failures],
        "revisions": [failure.revision for failure in failures],
        "known": [failure.revision_known for failure in failures],
        "delays": [getattr(failure.error, "retry_after", None) or 0.0 for failure in failures],
    }
