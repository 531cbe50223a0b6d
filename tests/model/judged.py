"""One judged step, and what may happen within it: the source's changes, accidents, another worker.

What does not belong here: what a worker does with the queue (`workers`), and what comes in which order (`machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine
from model import laws
from model.laws import Memory
from model.world import SLOTS, Snapshot, Words, World

from embed_assets.models import SourceRow, Wave

EVERYWHERE = 1_000


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


class Judged(RuleBasedStateMachine):
    """What happens to `world`, and what is remembered of it. A step breaks no law, or the example ends."""

    world: World
    tally: Tally

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.world.reset()
        self.memory = Memory(sent=self.world.embedder.sent)
        self.now: Snapshot = self.world.look()
        self.handles: list[Handle] = []
        self.held: tuple[str, str, bool, bool] | None = None
        self.acting = self.unlocked = 0
        self.acted: list[str] = []
        self.touched: set[str] = set()

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
        """`3` is row 3, `@1` the second row that a wave holds, `=1` the second that is indexed and has no entry."""
        if name.isdigit():
            return name
        leased = [slot for slot, entry in self.now.entries.items() if entry.status == "leased"]
        indexed = [slot for slot in self.now.stamps if slot not in self.now.entries]
        found = sorted(leased if name[0] == "@" else indexed) or SLOTS
        return found[int(name[1:]) % len(found)]

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

    def _commit_producer(self) -> None:
        assert self.held is not None
        _, slot, changed, forced = self.held
        self.world.producer.commit()
        self.held = None
        self._remember(slot, changed, "force" if forced else "say")
