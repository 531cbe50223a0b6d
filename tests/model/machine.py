"""The queue under everything that may happen to it, in any order, on a real database.

Two workers, a producer whose transactions commit late, an operator, and time that passes by hand. Steps are
sequential, but an operation of a worker may have somebody else's action happen before any of its statements: one that
waits for nothing. After each step the laws are judged; an example ends with a drain until nothing is left to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model import laws
from model.laws import Memory
from model.world import SLOTS, Snapshot, Words, World

from embed_assets import pipeline
from embed_assets.errors import InputRejected, LeaseLost, RowRejected
from embed_assets.models import Failure, SourceRow, Wave
from embed_assets.resources.assembly import Kind
from embed_assets.resources.chunk_store import AFTER_CHECK, WRITE
from embed_assets.stop import Stop

ROUNDS = 8
SETTLE_STATEMENT = 3 + len(WRITE) + 1 + len(AFTER_CHECK) + 1
EVERYWHERE = 1_000
WORDS = st.lists(st.sampled_from("abcd"), max_size=3).map(tuple)
# A row, or the n-th of those that some wave holds: races are about these.
SLOT = st.sampled_from((*SLOTS, "@0", "@1", "@2", "@0", "@1", "@2"))
WORKER = st.sampled_from((0, 1))
SAY = st.sampled_from(("", "say", "say", "force", "force"))
PART = st.sampled_from((None, None, None, "even", "odd", "nothing"))
# Where the races are; every other rule counts once.
WEIGHTS = {"come_in": 3, "race": 4, "write": 3, "haunt": 2, "fail": 2, "reject": 2, "operate": 3}
# To reopen what is open changes nothing: an announcement of nothing new.
WHAT = st.sampled_from(("edit", "edit", "reopen", "reopen", "close", "delete"))
RECENT = st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2, 3))
LIMIT = st.sampled_from((1, 2, 3, 6))
FORGED = st.sampled_from((False, False, True))
CHANGES = st.lists(st.tuples(SLOT, WHAT, WORDS, SAY), min_size=1, max_size=4)
SOURCE_ACTION = st.tuples(st.just("source"), SLOT, WHAT, WORDS, SAY)
OTHER_ACTION = st.tuples(st.sampled_from(("purge", "lose", "claim", "lapse", "enqueue")))
WITHIN = st.none() | st.tuples(st.integers(1, 14), SOURCE_ACTION | OTHER_ACTION)


@dataclass(eq=False)
class Handle:
    """A wave as the worker that claimed it holds it, for ever."""

    wave: Wave
    worker: int
    rows: list[SourceRow] = field(default_factory=list)
    missing: dict[bytes, str] = field(default_factory=dict)


@dataclass
class Tally:
    """How many steps were made, and at which of them the first law was broken."""

    steps: int = 0
    broken_at: int | None = None
    broken: str = ""

    def note(self, error: Exception) -> None:
        if self.broken_at is None:
            self.broken_at, self.broken = self.steps, f"{type(error).__name__}: {error}"


class QueueMachine(RuleBasedStateMachine):
    world: World
    tally: Tally

    def __init__(self) -> None:
        super().__init__()
        # Hypothesis switches many rules off for each example, and then too little comes together here.
        self._rules_strategy = any_rule(self)
        self.broken = False
        self.world.reset()
        self.memory = Memory(sent=self.world.embedder.sent)
        self.now: Snapshot = self.world.look()
        self.handles: list[Handle] = []
        self.held: tuple[str, str, bool, bool] | None = None
        self.acting = self.unlocked = 0
        self.acted: list[str] = []
        self.touched: set[str] = set()

    # One step

    @contextmanager
    def step(self, *judges: Callable[[Snapshot, Snapshot], None]) -> Iterator[Snapshot]:
        """What happens inside is judged: by the laws of every step and by those of this one."""
        self.tally.steps += 1
        before, generation, self.acted = self.now, self.world.embedder.generation, []
        self.touched = set()
        try:
            yield before
            self.now = after = self.world.look()
            laws.always(before, after, self.memory, generation, alone=not self.others_acted)
            if not self.others_acted:
                for judge in judges:
                    judge(before, after)
            if self.tally.steps % 4 == 0:
                counts = self.world.workers[0].outbox.status("").counts
                assert dict(counts) == laws.status_counts(after), "the status does not count every row once"
        except Exception as error:
            self.broken = True
            self.tally.note(error)
            raise

    @property
    def others_acted(self) -> bool:
        """Whether another worker claimed or enqueued, or a lease ran out, within this step."""
        return bool({"claim", "lapse", "enqueue"} & set(self.acted))

    @contextmanager
    def interleaved(self, worker: int, within: Any, unlocked: int) -> Iterator[None]:
        """The action of somebody else before a statement of this worker, which locks no entry before `unlocked`."""
        self.unlocked = unlocked
        if within is None:
            yield
            return
        with self.world.postgres[worker].armed(within[0], lambda: self._act(worker, *within[1])):
            yield

    def _act(self, worker: int, name: str, *values: Any) -> None:
        world = self.world
        late = (self.world.postgres[worker].fired_at or 0) - self.unlocked
        if name == "source":
            self._source(*values)
        elif name == "purge":
            world.db.execute("DELETE FROM embed_assets.chunk_embeddings")
        elif name == "lose":
            if late > 1:  # nobody loses the plan of a wave while its write reads it: the server would have crashed
                return
            world.db.execute("DELETE FROM embed_assets.wave_chunks")
        elif name == "enqueue":
            # An enqueue waits for locked entries, and would wait for ever here.
            if late > 0:
                return
            world.workers[1 - worker].enqueuer.enqueue()
        elif name == "lapse" and not world.expire(self.acting):
            return
        if name in ("claim", "lapse") and (wave := world.workers[1 - worker].outbox.claim("run", 2)):
            self.handles.append(Handle(wave, 1 - worker))
        self.acted.append(name)

    # The source and its producers

    def _source(self, slot: str, what: str, words: Words, say: str) -> None:
        """One transaction of a producer; a row that an open one holds is left alone."""
        slot = self._slot(slot)
        if self.held and self.held[0] == slot:
            return
        self.touched.add(slot)
        with self.world.db.transaction():
            changed = self._change(self.world.db, slot, what, words)
            if say:
                self.world.announce(self.world.db, slot, say == "force")
        self._remember(slot, changed, say)

    def _slot(self, name: str) -> str:
        if not name.startswith("@"):
            return name
        leased = sorted(slot for slot, entry in self.now.entries.items() if entry.status == "leased") or SLOTS
        return leased[int(name[1:]) % len(leased)]

    def _change(self, connection: Any, slot: str, what: str, words: Words) -> bool:
        present = connection.execute("SELECT 1 FROM jobs WHERE id = %s", (slot,)).fetchone() is not None
        revision = self.world.change(connection, slot, what, words, present)
        if revision and (not present or what == "edit"):
            self.memory.texts[revision] = words
            self.memory.revisions.setdefault(slot, set()).add(revision)
        return True

    def _remember(self, slot: str, changed: bool, say: str) -> None:
        if say:
            self.memory.announced.add(slot)
        elif changed:
            self.memory.announced.discard(slot)
        if say == "force":
            self.memory.forced_feed.add(slot)

    @initialize(texts=st.lists(WORDS, min_size=2, max_size=6), drained=st.booleans())
    def begin(self, texts: list[Words], drained: bool) -> None:
        with self.step():
            for slot, words in zip(SLOTS, texts, strict=False):
                self._source(slot, "edit", words, "say")
        if drained:
            self._enqueue(0, scan=False)
            self._claim(0, 6)
            self._finish(self.handles[-1])

    @rule(slot=SLOT, what=WHAT, words=WORDS, say=SAY)
    def change(self, slot: str, what: str, words: Words, say: str) -> None:
        with self.step(laws.untouched):
            self._source(slot, what, words, say)

    @rule(slot=SLOT, forced=st.booleans())
    def announce(self, slot: str, forced: bool) -> None:
        slot = self._slot(slot)
        with self.step(laws.untouched):
            self.world.announce(self.world.db, slot, forced)
            self._remember(slot, False, "force" if forced else "say")

    @precondition(lambda self: self.held is None)
    @rule(slot=SLOT, what=st.sampled_from(("", "edit", "close", "reopen", "delete")), words=WORDS, forced=st.booleans())
    def open_producer(self, slot: str, what: str, words: Words, forced: bool) -> None:
        """Changes and announces a row, and commits later; the row is held until then if it was changed."""
        slot = self._slot(slot)
        with self.step(laws.untouched):
            changed = bool(what) and self._change(self.world.producer, slot, what, words)
            self.world.announce(self.world.producer, slot, forced)
            self.held = (slot if changed else "", slot, changed, forced)

    @precondition(lambda self: self.held is not None)
    @rule()
    def commit_producer(self) -> None:
        with self.step(laws.untouched):
            self._commit_producer()

    def _commit_producer(self) -> None:
        assert self.held is not None
        _, slot, changed, forced = self.held
        self.world.producer.commit()
        self.held = None
        self._remember(slot, changed, "force" if forced else "say")

    @rule(
        worker=WORKER,
        changes=CHANGES,
        limit=LIMIT,
        begun=st.sampled_from(("claimed", "planned", "staged")),
    )
    def come_in(self, worker: int, changes: list[Any], limit: int, begun: str) -> None:
        """Changes, and a worker that has taken them, perhaps planned or staged them."""
        with self.step(laws.untouched):
            for slot, what, words, say in changes:
                self._source(slot, what, words, say or "say")
        self._enqueue(worker, scan=False)
        handle = self._claim(worker, limit)
        if handle and begun == "planned":
            self._load(handle)
            self._plan(handle, handle.wave)
        if handle and begun == "staged":
            self._stage(handle)

    # Enqueue

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

    @precondition(lambda self: self.now.feed)
    @rule(worker=WORKER, within=WITHIN)
    def fold(self, worker: int, within: Any) -> None:
        self._enqueue(worker, scan=False, within=within)

    @rule(worker=WORKER, within=WITHIN)
    def scan(self, worker: int, within: Any) -> None:
        self._enqueue(worker, scan=True, within=within)

    @rule(worker=WORKER, within=WITHIN)
    def reconcile(self, worker: int, within: Any) -> None:
        self._enqueue(worker, scan=True, reconcile=True, within=within)

    # Waves

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

    @precondition(lambda self: any(e.status != "dead" for e in self.now.entries.values()))
    @rule(worker=WORKER, limit=LIMIT, within=WITHIN)
    def claim(self, worker: int, limit: int, within: Any) -> None:
        self._claim(worker, limit, within)

    @precondition(lambda self: self.over)
    @rule(
        recent=RECENT,
        name=st.sampled_from(("start", "plan", "stage", "write", "fail", "release", "renew")),
        forged=FORGED,
    )
    def haunt(self, recent: int, name: str, forged: bool) -> None:
        """A worker whose wave is over goes on with it, or somebody who never had it."""
        over = self.over
        handle = over[-1 - min(recent, len(over) - 1)]
        wave = _forge(handle.wave, forged)
        act: dict[str, Callable[[], Any]] = {
            "start": lambda: self._start(handle, forged),
            "plan": lambda: self._plan(handle, wave),
            "stage": lambda: self._stage(handle),
            "write": lambda: self._write(handle, wave),
            "fail": lambda: self._fail(handle, [False, True], True, forged),
            "release": lambda: self._release(handle, True, forged),
            "renew": lambda: self._renew(handle, wave),
        }
        act[name]()

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED)
    def start(self, recent: int, forged: bool) -> None:
        self._start(self._handle(recent), forged)

    def _start(self, handle: Handle, forged: bool = False) -> None:
        wave = _forge(handle.wave, forged)
        outbox = self._kind(handle).outbox
        self._fenced(handle, wave, lambda: outbox.start(wave), laws.untouched)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED)
    def renew(self, recent: int, forged: bool) -> None:
        handle = self._handle(recent)
        self._renew(handle, _forge(handle.wave, forged))

    def _renew(self, handle: Handle, wave: Wave) -> None:
        valid = self._fences(wave)
        with self.step(laws.untouched):
            refused = self._kind(handle).outbox.renew({wave.wave_id: wave.token})
            assert refused == (set() if valid else {wave.wave_id}), (
                "a renewal is refused exactly when the lease is lost"
            )

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, planned=st.booleans())
    def load(self, recent: int, planned: bool) -> None:
        handle = self._handle(recent)
        self._load(handle)
        if planned:
            self._plan(handle, handle.wave)

    def _load(self, handle: Handle) -> None:
        with self.step(lambda before, after: None):
            handle.rows = self._kind(handle).chunks.load(handle.wave, handle.wave.source_ids)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED)
    def plan(self, recent: int, forged: bool) -> None:
        """Of what was loaded, however long ago."""
        handle = self._handle(recent)
        self._plan(handle, _forge(handle.wave, forged))

    def _plan(self, handle: Handle, wave: Wave) -> None:
        kind = self._kind(handle)
        plans = [kind.bound.corpus.plan(row) for row in handle.rows]
        texts = {chunk.text_hash: chunk.sent for plan in plans for chunk in plan.chunks}

        def work() -> None:
            handle.missing = {text_hash: texts[text_hash] for text_hash in kind.chunks.plan(wave, plans)}

        self._fenced(handle, wave, work, laws.untouched)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT)
    def buy(self, recent: int) -> None:
        """Whoever bought keeps it: the ledger is nobody's."""
        handle = self._handle(recent)
        kind, hashes = self._kind(handle), list(handle.missing)
        with self.step(laws.nothing_written):
            for result in kind.embedder.embed(list(handle.missing.values()), stop=Stop()):
                mine = [hashes[position] for position in result.positions]
                kind.chunks.keep(handle.wave, mine, result.vectors, tokens=result.tokens)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, within=WITHIN)
    def stage(self, recent: int, within: Any) -> None:
        self._stage(self._handle(recent), within)

    def _stage(self, handle: Handle, within: Any = None) -> bool:
        ports = self._kind(handle).ports
        return self._fenced(
            handle, handle.wave, lambda: pipeline.stage(ports, handle.wave, Stop()), _noted, within=within
        )

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED, part=PART, within=WITHIN)
    def write(self, recent: int, forged: bool, part: str | None, within: Any) -> None:
        """Whole, or every other row in a transaction of its own, or nothing but the wave's end."""
        handle = self._handle(recent)
        self._write_part(handle, _forge(handle.wave, forged), part, within)

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

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, bought=st.booleans(), changes=CHANGES, told=st.booleans(), part=PART, within=WITHIN)
    def race(self, recent: int, bought: bool, changes: list[Any], told: bool, part: str | None, within: Any) -> None:
        """The source goes on while a wave is staged, and the enqueuer may hear of it before the write.

        After a part, failures of all its rows: those that were written are none of theirs any more.
        """
        handle = self._handle(recent)
        self._load(handle)
        if bought:
            self._stage(handle)
        with self.step(laws.untouched):
            for change in changes:
                self._source(*change)
        if told:
            self._enqueue(1 - handle.worker, scan=False)
        if not bought:
            self._plan(handle, handle.wave)
        self._write_part(handle, handle.wave, part, within)
        if part:
            self._fail(handle, [False] * len(handle.wave.entries), True)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT)
    def finish(self, recent: int) -> None:
        self._finish(self._handle(recent))

    def _finish(self, handle: Handle) -> None:
        if self._stage(handle):
            self._write(handle, handle.wave)

    @precondition(lambda self: self.open)
    @rule(
        recent=RECENT,
        forged=FORGED,
        fatal=st.lists(st.sampled_from((False, False, True)), min_size=1, max_size=3),
        known=st.booleans(),
    )
    def fail(self, recent: int, forged: bool, fatal: list[bool], known: bool) -> None:
        self._fail(self._handle(recent), fatal, known, forged)

    def _fail(self, handle: Handle, fatal: list[bool], known: bool, forged: bool = False) -> None:
        wave = _forge(handle.wave, forged)
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

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED, timed_out=st.booleans())
    def release(self, recent: int, forged: bool, timed_out: bool) -> None:
        self._release(self._handle(recent), timed_out, forged)

    def _release(self, handle: Handle, timed_out: bool, forged: bool = False) -> None:
        """An expired wave may be released too, a closed one or another's not."""
        wave = _forge(handle.wave, forged)
        known = self.now.waves.get(wave.wave_id)
        valid = known and known.token == wave.token and not known.closed

        def judge(before: Snapshot, after: Snapshot) -> None:
            if valid:
                laws.released(before, after, wave.wave_id, timed_out)
            else:
                laws.nothing_written(before, after)

        with self.step(judge):
            self._kind(handle).outbox.release(wave, timed_out=timed_out)

    def _kind(self, handle: Handle) -> Kind:
        return self.world.workers[handle.worker]

    # Time, accidents and the operator

    @precondition(lambda self: self.open)
    @rule(recent=RECENT)
    def expire(self, recent: int) -> None:
        self._expire(self._handle(recent))

    def _expire(self, handle: Handle) -> None:
        with self.step(laws.untouched):
            self.world.expire(handle.wave.wave_id)

    @rule(worker=WORKER, limit=LIMIT, times=st.integers(1, 3), started=st.booleans())
    def vanish(self, worker: int, limit: int, times: int, started: bool) -> None:
        """Processes that claim, perhaps begin, and never come back."""
        for _ in range(times):
            handle = self._claim(worker, limit)
            if handle is None:
                return
            if started:
                self._start(handle)
            self._expire(handle)

    @rule(worker=WORKER, limit=LIMIT, times=st.integers(1, 4), timed_out=st.booleans())
    def give_up(self, worker: int, limit: int, times: int, timed_out: bool) -> None:
        """Waves that are cancelled, or use up their time, before anything is staged."""
        for _ in range(times):
            handle = self._claim(worker, limit)
            if handle is None:
                return
            self._start(handle)
            self._release(handle, timed_out)

    @rule(worker=WORKER, limit=LIMIT, times=st.sampled_from((1, 3, 3)), fatal=st.booleans(), known=st.booleans())
    def reject(self, worker: int, limit: int, times: int, fatal: bool, known: bool) -> None:
        """Rows that fail again and again, each time they are due."""
        for _ in range(times):
            handle = self._claim(worker, limit)
            if handle is None:
                return
            self._load(handle)
            self._fail(handle, [fatal] * limit, known)
            self._release(handle, False)
            self._ripen()

    @rule()
    def ripen(self) -> None:
        self._ripen()

    def _ripen(self) -> None:
        with self.step():
            self.world.ripen()

    @rule()
    def end_parks(self) -> None:
        with self.step():
            self.world.end_parks()

    @rule(name=st.sampled_from(("purge", "lose")))
    def accident(self, name: str) -> None:
        """The ledger is purged, or the plans of all waves are lost with an unlogged table."""
        with self.step(laws.untouched):
            self.unlocked = EVERYWHERE
            self._act(0, name)

    @precondition(lambda self: self.now.chunks)
    @rule(
        number=st.integers(0, len(SLOTS) - 1),
        indexes=st.sampled_from(((0,), (1,), (0, 1, 2))),
        what=st.sampled_from(("", "", "close", "delete")),
    )
    def prune(self, number: int, indexes: tuple[int, ...], what: str) -> None:
        """Somebody deletes chunks behind everybody's back, perhaps their row too; a reconcile repairs it."""
        slot = sorted(self.now.chunks)[number % len(self.now.chunks)]
        with self.step(laws.untouched):
            deleted = self.world.db.execute(
                "DELETE FROM embed_assets.job_semantic_chunks WHERE id = %s AND chunk_index = ANY(%s)",
                (slot, list(indexes)),
            )
            if deleted.rowcount:
                self.memory.pruned.add(slot)
            if what and slot in self.now.rows:
                self._source(slot, what, (), "")

    @precondition(lambda self: any(e.status == "dead" for e in self.now.entries.values()))
    @rule(dismiss=st.booleans(), slot=st.none() | st.sampled_from(SLOTS))
    def operate(self, dismiss: bool, slot: str | None) -> None:
        def judge(before: Snapshot, after: Snapshot) -> None:
            for key, old in before.entries.items():
                entry = after.entries[key]
                if old.status == "dead" and not old.dismissed and slot in (None, key):
                    assert (entry.status, entry.dismissed) == (("dead", True) if dismiss else ("pending", False))
                    assert dismiss or not entry.attempts
                else:
                    assert entry == old, "an operator's act took what was not dead"

        with self.step(judge):
            ids = None if slot is None else [slot]
            operator = self.world.operator
            done = operator.dismiss(ids=ids) if dismiss else operator.retry(ids=ids)
            assert done <= len(SLOTS)

    @rule(pause=st.sampled_from((True, False, False)))
    def pause(self, pause: bool) -> None:
        with self.step(laws.untouched):
            changed = self.world.operator.pause() if pause else self.world.operator.resume()
            assert changed == (self.now.paused != pause)

    # The end

    def teardown(self) -> None:
        if self.broken:
            return
        try:
            self._drain()
        except Exception as error:
            self.tally.note(error)
            raise

    def _drain(self) -> None:
        """Everybody who holds something is gone; both workers drain until nothing is left."""
        if self.held:
            self.commit_producer()
        if self.now.paused:
            self.pause(False)
        for handle in self.open:
            self._expire(handle)
        for attempt in range(ROUNDS):
            self._ripen()
            self._enqueue(attempt % 2, scan=True, reconcile=attempt < 2)
            worked = False
            while handle := self._claim(attempt % 2, 6):
                worked = True
                self._finish(handle)
            if not worked and attempt >= 2:
                break
        else:
            raise AssertionError("the queue does not come to rest")
        with self.step(lambda before, after: laws.quiet(after, self.memory)):
            pass


@st.composite
def any_rule(draw: Callable[[Any], Any], machine: QueueMachine) -> Any:
    """One of the rules that are possible now, by weight, and its arguments."""
    possible = [rule for rule in machine.rules if all(holds(machine) for holds in rule.preconditions)]
    chosen = draw(st.sampled_from([rule for rule in possible for _ in range(WEIGHTS.get(rule.function.__name__, 1))]))
    return chosen, draw(st.fixed_dictionaries(chosen.arguments))


def _forge(wave: Wave, forged: bool) -> Wave:
    return replace(wave, token=uuid4()) if forged else wave


def _without(entries: Any, slots: set[str]) -> dict[str, Any]:
    return {slot: entry for slot, entry in entries.items() if slot not in slots}


def _noted(before: Snapshot, after: Snapshot) -> None:
    """Staging changes no entry, but notes the revision of a suspect."""
    for slot, old in before.entries.items():
        entry = after.entries[slot]
        noted = old._replace(revision=entry.revision, revision_known=entry.revision_known)
        assert entry == (noted if old.crashes >= 2 or old.timeouts >= 2 else old), "staging changed an entry"
