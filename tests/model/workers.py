"""What a worker does with the queue, each as one judged step: it succeeds exactly when it may.

What does not belong here: what comes in which order (`machine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from model import laws
from model.judged import EVERYWHERE, Handle, Judged
from model.world import Snapshot

from embed_assets import pipeline
from embed_assets.errors import InputRejected, LeaseLost, RowRejected
from embed_assets.models import Failure, Wave
from embed_assets.resources.assembly import Kind
from embed_assets.resources.chunk_store import AFTER_CHECK, WRITE
from embed_assets.stop import Stop

# A queue of six rows that is not done after so much goes round in circles.
ROUNDS, WAVES = 8, 20
SETTLE_STATEMENT = 3 + len(WRITE) + 1 + len(AFTER_CHECK) + 1


class Workers(Judged):
    """Enqueue, claim, and everything under a wave's token, with the handle that a worker keeps for ever."""

    def _enqueue(self, worker: int, *, scan: bool, reconcile: bool = False, within: Any = None) -> None:
        fed = {f.source_id for f in self.now.feed}

        def judge(before: Snapshot, after: Snapshot) -> None:
            settled, scanned, touched = not self.touched, scan or reconcile, self.touched
            fed.difference_update(touched)  # folded or not
            left = {f.source_id for f in after.feed} - touched
            assert not left, "an enqueue left the feed"
            mine = replace(before, entries=_without(before.entries, touched))
            yours = replace(after, entries=_without(after.entries, touched))
            laws.folded(mine, yours, fed, scanned=scanned, reconciled=reconcile, settled=settled)
            if scanned and settled:
                assert not self.world.workers[worker].outbox.stale(), "a scan is wanted right after one"

        with self.step(judge):
            self.world.scan_late(reconcile=reconcile)
            with self.interleaved(worker, within, EVERYWHERE):
                report = self.world.workers[worker].enqueuer.enqueue(scan=scan)
            self.world.scan_late()
            assert not report.skipped
            assert report.scanned == (scan or reconcile)

    def _claim(self, worker: int, limit: int, within: Any = None) -> Handle | None:
        waves: list[Wave | None] = []
        with self.step(lambda before, after: laws.claimed(before, after, waves[0], limit)):
            with self.interleaved(worker, within, 2):
                waves.append(self.world.workers[worker].outbox.claim("run", limit))
            if waves[0] is not None:
                self.handles.append(Handle(waves[0], worker))
                return self.handles[-1]
        return None

    @property
    def open(self) -> list[Handle]:
        """Of waves that nobody closed; those whose lease is over come first."""
        waves = [(self.now.waves[handle.wave.wave_id], handle) for handle in self.handles]
        live = [handle for wave, handle in waves if not wave.closed and not wave.lapsed]
        return [handle for wave, handle in waves if not wave.closed and wave.lapsed] + live

    @property
    def over(self) -> list[Handle]:
        """Of waves that are closed or whose lease is over; the latter last, for they are the dangerous ones."""
        waves = [(self.now.waves[handle.wave.wave_id], handle) for handle in self.handles]
        lapsed = [handle for wave, handle in waves if not wave.closed and wave.lapsed]
        return [handle for wave, handle in waves if wave.closed] + lapsed

    def _handle(self, recent: int) -> Handle:
        """The n-th newest of those that are live, then of the others."""
        known = self.open
        return known[-1 - min(recent, len(known) - 1)]

    def _kind(self, handle: Handle) -> Kind:
        return self.world.workers[handle.worker]

    def _fences(self, wave: Wave) -> bool:
        known = self.now.waves.get(wave.wave_id)
        return bool(known and known.token == wave.token and not known.closed and not known.lapsed)

    def _fenced(
        self,
        handle: Handle,
        wave: Wave,
        action: Callable[[], Any],
        *judges: Any,
        within: Any = None,
        unlocked: int = 1,
    ) -> bool:
        """Succeeds exactly when the wave is open, unexpired and of that token; else it changes nothing."""
        valid, done, self.acting = self._fences(wave), True, wave.wave_id
        with self.step(*(judges if valid else (laws.nothing_written,))):
            try:
                with self.interleaved(handle.worker, within, unlocked):
                    action()
            except LeaseLost:
                done = False
            if done != valid:
                assert self.others_acted, f"a wave that fences: {valid}; and the action was allowed: {done}"
        return done

    def _start(self, handle: Handle, forged: bool = False) -> None:
        wave = forge(handle.wave, forged)
        outbox = self._kind(handle).outbox
        self._fenced(handle, wave, lambda: outbox.start(wave), laws.untouched)

    def _renew(self, handle: Handle, wave: Wave) -> None:
        known = self.now.waves.get(wave.wave_id)
        own = known and known.token == wave.token and known.outcome == "written"
        valid = own or self._fences(wave)
        with self.step(laws.untouched):
            refused = self._kind(handle).outbox.renew({wave.wave_id: wave.token})
            assert refused == (set() if valid else {wave.wave_id}), (
                "a renewal is refused exactly when the lease is lost, which a wave's own write is not"
            )

    def _load(self, handle: Handle) -> None:
        with self.step(lambda before, after: None):
            handle.rows = self._kind(handle).chunks.load(handle.wave, handle.wave.source_ids)

    def _plan(self, handle: Handle, wave: Wave) -> None:
        kind = self._kind(handle)
        plans = [kind.bound.corpus.plan(row) for row in handle.rows]
        texts = {chunk.text_hash: chunk.sent for plan in plans for chunk in plan.chunks}

        def work() -> None:
            handle.missing = {text_hash: texts[text_hash] for text_hash in kind.chunks.plan(wave, plans)}

        self._fenced(handle, wave, work, laws.untouched)

    def _stage(self, handle: Handle, within: Any = None) -> bool:
        ports = self._kind(handle).ports
        return self._fenced(
            handle, handle.wave, lambda: pipeline.stage(ports, handle.wave, Stop()), _noted, within=within
        )

    def _write_part(self, handle: Handle, wave: Wave, part: str | None, within: Any) -> None:
        ids = handle.wave.source_ids
        parts = {None: None, "even": ids[::2], "odd": ids[1::2], "nothing": []}
        self._write(handle, wave, parts[part], within)

    def _write(self, handle: Handle, wave: Wave, ids: list[str] | None = None, within: Any = None) -> bool:
        store, close = self._kind(handle).chunks, not ids
        known = self.now.waves.get(wave.wave_id)
        if close and known and known.outcome == "written" and known.token == wave.token:
            with self.step(laws.nothing_written):  # the answer of its commit was lost: it is done
                assert store.write(wave, ids=ids).dead == 0
            return True

        def judge(before: Snapshot, after: Snapshot) -> None:
            fired = self.world.postgres[handle.worker].fired_at or SETTLE_STATEMENT + 1
            settled = not self.touched or fired <= SETTLE_STATEMENT
            laws.written(before, after, wave.wave_id, None if ids is None else set(ids), settled=settled, close=close)

        return self._fenced(
            handle, wave, lambda: store.write(wave, ids=ids, close=close), judge, within=within, unlocked=3
        )

    def _finish(self, handle: Handle) -> None:
        if self._stage(handle):
            self._write(handle, handle.wave)

    def _fail(self, handle: Handle, fatal: list[bool], known: bool, forged: bool = False) -> None:
        wave = forge(handle.wave, forged)
        loaded = {row.source_id: row.revision for row in handle.rows}
        given = dict(zip(wave.source_ids, fatal, strict=False))
        failures = [
            Failure(
                slot,
                InputRejected("refused") if deterministic else RowRejected("refused"),
                loaded.get(slot),
                revision_known=known and slot in loaded,
            )
            for slot, deterministic in given.items()
        ]

        def work() -> None:
            self._kind(handle).outbox.fail(wave, failures)
            self.world.postpone()

        self._fenced(handle, wave, work, lambda before, after: laws.failed(before, after, wave.wave_id, given))

    def _release(self, handle: Handle, timed_out: bool, forged: bool = False) -> None:
        """An expired wave may be released too, a closed one or another's not."""
        wave = forge(handle.wave, forged)
        known = self.now.waves.get(wave.wave_id)
        valid = known and known.token == wave.token and not known.closed

        def judge(before: Snapshot, after: Snapshot) -> None:
            if valid:
                laws.released(before, after, wave.wave_id, timed_out)
            else:
                laws.nothing_written(before, after)

        with self.step(judge):
            self._kind(handle).outbox.release(wave, timed_out=timed_out)

    def _expire(self, handle: Handle) -> None:
        with self.step(laws.untouched):
            self.world.expire(handle.wave.wave_id)

    def _ripen(self) -> None:
        with self.step():
            self.world.ripen()

    def _drain(self) -> None:
        """Everybody who holds something is gone; both workers drain until nothing is left."""
        if self.held:
            with self.step(laws.untouched):
                self._commit_producer()
        if self.now.paused:
            with self.step(laws.untouched):
                self.world.operator.resume()
        for handle in self.open:
            self._expire(handle)
        for attempt in range(ROUNDS):
            self._ripen()
            self._enqueue(attempt % 2, scan=True, reconcile=attempt < 2)
            waves = 0
            while waves < WAVES and (handle := self._claim(attempt % 2, 6)):
                waves += 1
                self._finish(handle)
            if not waves and attempt >= 2:
                break
        else:
            raise AssertionError("the queue does not come to rest")
        with self.step(lambda before, after: laws.quiet(after, self.memory)):
            pass


def forge(wave: Wave, forged: bool) -> Wave:
    return replace(wave, token=uuid4()) if forged else wave


def _without(entries: Any, slots: set[str]) -> dict[str, Any]:
    return {slot: entry for slot, entry in entries.items() if slot not in slots}


def _noted(before: Snapshot, after: Snapshot) -> None:
    """Staging changes no entry, but notes the revision of a suspect."""
    for slot, old in before.entries.items():
        entry = after.entries[slot]
        noted = old._replace(revision=entry.revision, revision_known=entry.revision_known)
        assert entry == (noted if old.crashes >= 2 or old.timeouts >= 2 else old), "staging changed an entry"
