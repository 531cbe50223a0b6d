"""The queue under everything that may happen to it, in any order, on a real database.

Two workers, a producer whose transactions commit late, an operator, and time that passes by hand. Steps are
sequential, but an operation of a worker may have somebody else's action happen before any of its statements: one that
waits for nothing. After each step the laws are judged; an example ends with a drain until nothing is left to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from model import laws
from model.judged import EVERYWHERE
from model.workers import Workers, forge
from model.world import SLOTS, Snapshot, Words

from embed_assets.stop import Stop

WORDS = st.lists(st.sampled_from("abcd"), max_size=3).map(tuple)
# A row, or the n-th of those that some wave holds, or of those that are done.
SLOT = st.sampled_from((*SLOTS, "@0", "@1", "@2", "@0", "@1", "@2", "=0", "=1", "=2"))
WORKER = st.sampled_from((0, 1))
SAY = st.sampled_from(("", "", "say", "say", "force", "force"))
PART = st.sampled_from((None, None, None, "even", "odd", "nothing"))
# Where the races are; every other rule counts once.
WEIGHTS = {
    "come_in": 3,
    "race": 4,
    "write": 3,
    "haunt": 2,
    "fail": 2,
    "reject": 2,
    "operate": 3,
    "prune": 3,
    "finish": 2,
    "vanish": 2,
}
# To reopen what is open changes nothing: an announcement of nothing new.
WHAT = st.sampled_from(("edit", "edit", "reopen", "reopen", "close", "delete"))
RECENT = st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2, 3))
LIMIT = st.sampled_from((1, 2, 3, 6))
FORGED = st.sampled_from((False, False, True))
CHANGES = st.lists(st.tuples(SLOT, WHAT, WORDS, SAY), min_size=1, max_size=4)
SOURCE_ACTION = st.tuples(st.just("source"), SLOT, WHAT, WORDS, SAY)
OTHER_ACTION = st.tuples(st.sampled_from(("purge", "lose", "claim", "lapse", "enqueue")))
WITHIN = st.none() | st.tuples(st.integers(1, 14), SOURCE_ACTION | OTHER_ACTION)


class QueueMachine(Workers):
    """Every rule is possible whenever its precondition holds; steps are those of `workers`."""

    def __init__(self) -> None:
        super().__init__()
        # Hypothesis switches many rules off for each example, and then too little comes together here.
        self._rules_strategy = any_rule(self)

    # The source and its producers

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
        wave = forge(handle.wave, forged)
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

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED)
    def renew(self, recent: int, forged: bool) -> None:
        handle = self._handle(recent)
        self._renew(handle, forge(handle.wave, forged))

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, planned=st.booleans())
    def load(self, recent: int, planned: bool) -> None:
        handle = self._handle(recent)
        self._load(handle)
        if planned:
            self._plan(handle, handle.wave)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED)
    def plan(self, recent: int, forged: bool) -> None:
        """Of what was loaded, however long ago."""
        handle = self._handle(recent)
        self._plan(handle, forge(handle.wave, forged))

    @precondition(lambda self: self.open)
    @rule(recent=RECENT)
    def buy(self, recent: int) -> None:
        """Whoever bought keeps it: the ledger is nobody's. The wave counts it while its lease lasts."""
        handle = self._handle(recent)
        kind, hashes = self._kind(handle), list(handle.missing)
        counted = len(hashes) if self._fences(handle.wave) else 0
        with self.step(lambda before, after: laws.bought(before, after, handle.wave.wave_id, counted)):
            for result in kind.embedder.embed(list(handle.missing.values()), stop=Stop()):
                mine = [hashes[position] for position in result.positions]
                kind.chunks.keep(handle.wave, mine, result.vectors, tokens=result.tokens)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, within=WITHIN)
    def stage(self, recent: int, within: Any) -> None:
        self._stage(self._handle(recent), within)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED, part=PART, within=WITHIN)
    def write(self, recent: int, forged: bool, part: str | None, within: Any) -> None:
        """Whole, or every other row in a transaction of its own, or nothing but the wave's end."""
        handle = self._handle(recent)
        self._write_part(handle, forge(handle.wave, forged), part, within)

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

    @precondition(lambda self: self.open)
    @rule(
        recent=RECENT,
        forged=FORGED,
        fatal=st.lists(st.sampled_from((False, False, True)), min_size=1, max_size=3),
        known=st.booleans(),
    )
    def fail(self, recent: int, forged: bool, fatal: list[bool], known: bool) -> None:
        self._fail(self._handle(recent), fatal, known, forged)

    @precondition(lambda self: self.open)
    @rule(recent=RECENT, forged=FORGED, timed_out=st.booleans())
    def release(self, recent: int, forged: bool, timed_out: bool) -> None:
        self._release(self._handle(recent), timed_out, forged)

    # Time, accidents and the operator

    @precondition(lambda self: self.open)
    @rule(recent=RECENT)
    def expire(self, recent: int) -> None:
        self._expire(self._handle(recent))

    @rule(worker=WORKER, limit=LIMIT, times=st.sampled_from((1, 3, 3)), started=st.sampled_from((True, True, False)))
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

    @rule(worker=WORKER, limit=LIMIT, times=st.sampled_from((1, 3, 3)), fatal=st.booleans(), dismissed=st.booleans())
    def reject(self, worker: int, limit: int, times: int, fatal: bool, dismissed: bool) -> None:
        """Rows that fail again and again, each time they are due, until somebody gives them up."""
        for _ in range(times):
            handle = self._claim(worker, limit)
            if handle is None:
                return
            self._load(handle)
            self._fail(handle, [fatal] * limit, True)
            self._release(handle, False)
            self._ripen()
        if dismissed:
            with self.step():
                self.world.operator.dismiss()

    @rule()
    def ripen(self) -> None:
        self._ripen()

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
        number=st.integers(0, 2),
        indexes=st.sampled_from(((0,), (0,), (1,), (0, 1, 2))),
        what=st.sampled_from(("", "", "close", "delete")),
    )
    def prune(self, number: int, indexes: tuple[int, ...], what: str) -> None:
        """Somebody deletes chunks behind everybody's back, perhaps their row too; a reconcile repairs it."""
        longest = sorted(self.now.chunks, key=lambda slot: (-len(self.now.chunks[slot]), slot))
        slot = longest[number % len(longest)]
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


@st.composite
def any_rule(draw: Callable[[Any], Any], machine: QueueMachine) -> Any:
    """One of the rules that are possible now, by weight, and its arguments."""
    possible = [rule for rule in machine.rules if all(holds(machine) for holds in rule.preconditions)]
    chosen = draw(st.sampled_from([rule for rule in possible for _ in range(WEIGHTS.get(rule.function.__name__, 1))]))
    return chosen, draw(st.fixed_dictionaries(chosen.arguments))
