"""What must hold: after every step, and of each kind of step. Pure functions of two snapshots and what is remembered.

An assertion that fails here names the law that the queue broke.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from model.world import PREFIX, SLOTS, Snapshot, body_of

MAX_ATTEMPTS = MAX_CRASHES = 3
ENDS = ("indexed", "removed", "gone", "superseded")
CHARGES = ("attempts", "crashes", "timeouts", "failures", "deaths")


@dataclass
class Memory:
    """What no table says: every text there ever was, what was announced, and who asked for new vectors when."""

    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    revisions: dict[str, set[str]] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    forced_feed: set[str] = field(default_factory=set)
    forced: dict[str, int] = field(default_factory=dict)
    pruned: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)


def always(before: Snapshot, after: Snapshot, memory: Memory, generation: int, *, alone: bool) -> None:
    """`generation`: of the last vector bought before this step. `alone`: nobody else's claim happened within it."""
    _remember_forced(after, memory, generation)
    for slot in SLOTS:
        _announced_is_known(slot, after, memory)
        _facts_are_whole(slot, after, memory)
        _forced_is_served(slot, after, memory)
    for slot, entry in after.entries.items():
        _charges(before.entries.get(slot), entry, before, after)
    _deaths_are_logged(before, after, alone)
    logged = Counter((line.wave_id, line.outcome) for line in after.log)
    for wave in after.waves.values():
        _accounts(before.waves.get(wave.wave_id), wave, logged, after)


def _announced_is_known(slot: str, now: Snapshot, memory: Memory) -> None:
    if slot not in memory.announced or slot in memory.pruned or not now.stale(slot):
        return
    known = slot in now.entries or any(f.source_id == slot for f in now.feed)
    assert known, f"the announced change of row {slot} is lost: neither entry nor feed row, and its facts are old"


def _facts_are_whole(slot: str, now: Snapshot, memory: Memory) -> None:
    stamp, chunks = now.stamps.get(slot), now.chunks.get(slot, ())
    for chunk in chunks:
        text = memory.sent[int(chunk.vector[0])]
        assert text == PREFIX + chunk.body, f"row {slot} has the vector of another text"
    if slot in memory.pruned:
        if (stamp and stamp.chunk_count == len(chunks)) or not (stamp or chunks):
            memory.pruned.discard(slot)
        return
    if stamp is None:
        assert not chunks, f"row {slot} has chunks and no stamp"
        return
    assert stamp.revision in memory.revisions.get(slot, ()), f"row {slot} is stamped with what it never was"
    assert [c.chunk_index for c in chunks] == list(range(stamp.chunk_count)), f"row {slot} is not whole"
    expected = [body_of(word) for word in memory.texts[stamp.revision]]
    assert [c.body for c in chunks] == expected, f"the stamp of row {slot} names another text than its chunks"


def _remember_forced(now: Snapshot, memory: Memory, generation: int) -> None:
    """A forced feed row that is gone was folded: what was bought until then does not serve it."""
    waiting = {f.source_id for f in now.feed if f.forced}
    for slot in memory.forced_feed - waiting:
        memory.forced[slot] = generation
    memory.forced_feed &= waiting


def _forced_is_served(slot: str, now: Snapshot, memory: Memory) -> None:
    """A forced entry ends, or stops being forced, by vectors bought after it was folded, or by a clearing."""
    if slot not in memory.forced:
        return
    entry = now.entries.get(slot)
    if entry is not None and entry.forced:
        return
    since = memory.forced.pop(slot)
    ends = {line.outcome for line in now.log if line.source_id == slot}
    assert ends & {"indexed", "removed", "gone"}, f"the forced request of row {slot} is lost"
    if "indexed" in ends:
        old = [c for c in now.chunks.get(slot, ()) if c.vector[1] <= since]
        assert not old, f"the forced request of row {slot} got old vectors"


def _charges(old: Any, entry: Any, before: Snapshot, after: Snapshot) -> None:
    assert entry.attempts <= MAX_ATTEMPTS, "more attempts than allowed"
    assert entry.crashes <= MAX_CRASHES, "more crashes than allowed"
    if old is None:
        assert not any(getattr(entry, name) for name in CHARGES), "a new entry is charged"
        return
    assert entry.enqueued_at == old.enqueued_at, "an entry's age is forgotten"
    assert entry.crashes <= old.crashes + 1, "one wave crashed twice"
    if entry.crashes > old.crashes:
        wave = after.waves[old.wave_id]
        assert (wave.outcome, wave.started) == ("expired", True), "a crash is charged and no started wave was lost"
        assert old.status == "leased", "a crash is charged to who was not leased"


def _deaths_are_logged(before: Snapshot, after: Snapshot, alone: bool) -> None:
    logged = Counter(line.source_id for line in after.log if line.outcome == "dead")
    for slot, entry in after.entries.items():
        old = before.entries.get(slot)
        died = entry.status == "dead" and (old is None or old.status != "dead")
        enough = logged[slot] == died if alone else logged[slot] >= died
        assert enough, f"row {slot} died {int(died)} times and the log has {logged[slot]}"


def _accounts(old: Any, wave: Any, logged: Counter[tuple[int, str]], now: Snapshot) -> None:
    """claimed = what became of each + lost, at close; and each counter is what the log says."""
    became = sum(getattr(wave, name) for name in (*ENDS, "failed", "dead"))
    for name in ENDS:
        new = getattr(wave, name) - (getattr(old, name) if old else 0)
        assert new == logged[wave.wave_id, name], f"wave {wave.wave_id} counts {name} otherwise than the log"
    assert min(wave.lost, wave.claimed - became) >= 0, f"wave {wave.wave_id} accounts for more than it claimed"
    if wave.closed:
        assert wave.claimed == became + wave.lost, f"wave {wave.wave_id} does not account for all that it claimed"
        if old and old.closed:
            assert wave == old, f"wave {wave.wave_id} was closed and changed"
    else:
        assert wave.lost == 0, f"wave {wave.wave_id} is open and has lost"
        assert len(now.leased(wave.wave_id)) <= wave.claimed - became, f"wave {wave.wave_id} holds more than is its own"


def status_counts(now: Snapshot) -> dict[str, int]:
    """Every row and every leftover stamp once; the first that applies."""
    feed = {f.source_id for f in now.feed}
    return dict(Counter(_state(slot, now, feed) for slot in now.rows.keys() | now.stamps.keys()))


def _state(slot: str, now: Snapshot, feed: set[str]) -> str:
    entry, row = now.entries.get(slot), now.rows.get(slot)
    status = entry.status if entry else None
    if entry and status == "dead" and not entry.dismissed:
        return "dead"
    if status in ("leased", "retry_wait"):
        return {"leased": "leased", "retry_wait": "waiting"}[status]
    if status == "pending" or slot in feed or (entry is None and now.stale(slot)):
        return "due"
    if row and row.indexable and not now.stale(slot):
        return "fresh"
    return "dismissed" if entry and entry.dismissed else "excluded"


def untouched(before: Snapshot, after: Snapshot, *, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Entries other than `but`, and whether they are there."""
    mine, yours = before.entries, after.entries
    for slot in (mine.keys() | yours.keys()) - but:
        assert mine.get(slot) == yours.get(slot), f"row {slot}'s entry was none of this step's business"


def nothing_written(before: Snapshot, after: Snapshot) -> None:
    """What a fenced-out worker may do: nothing."""
    untouched(before, after)
    assert before.stamps == after.stamps, "a fenced-out worker stamped"
    assert before.chunks == after.chunks, "a fenced-out worker wrote chunks"
    assert before.waves == after.waves, "a fenced-out worker changed a wave"


def bought(before: Snapshot, after: Snapshot, wave_id: int, counted: int) -> None:
    """Buying changes nothing but how many texts the wave says it has bought."""
    wave = before.waves[wave_id]
    waves = {**before.waves, wave_id: wave._replace(texts=wave.texts + counted)}
    nothing_written(replace(before, waves=waves), after)


def uncharged(old: Any, entry: Any, *, but: dict[str, int] | None = None) -> None:
    expected = {name: getattr(old, name) for name in CHARGES} | (but or {})
    assert {name: getattr(entry, name) for name in CHARGES} == expected, f"row {entry.source_id} is charged wrongly"


def folded(before: Snapshot, after: Snapshot, fed: set[str], *, scanned: bool, reconciled: bool, settled: bool) -> None:
    """Fed rows are entries; a scan adds exactly what is stale, and of the others touches only the dead.

    `settled`: the source did not change meanwhile.
    """
    for slot in before.entries.keys() | after.entries.keys():
        old, entry = before.entries.get(slot), after.entries.get(slot)
        assert entry is not None, f"an enqueue made the entry of row {slot} vanish"
        if slot in fed:
            _folded_entry(old, entry)
        elif old is None:
            assert scanned, f"row {slot} is enqueued by a fold that was not fed it"
            orphaned = reconciled and after.chunks.get(slot)
            assert after.stale(slot) or orphaned or not settled, f"row {slot} is enqueued for nothing"
        elif old != entry:
            _revived(old, entry, before, after, scanned, reconciled)
    missing = fed - after.entries.keys()
    assert not missing, f"rows {missing} were fed and have no entry"
    if scanned and settled:
        unseen = {slot for slot in SLOTS if after.stale(slot)} - after.entries.keys()
        assert not unseen, f"rows {unseen} are stale and the scan did not find them"


def _folded_entry(old: Any, entry: Any) -> None:
    status = "leased" if old and old.status == "leased" else "pending"
    assert entry.status == status, f"a request made a {old and old.status} entry {entry.status}"
    assert not any((entry.attempts, entry.crashes, entry.timeouts, entry.deaths, entry.dismissed))
    if old:
        assert entry.requested_at > old.requested_at, "a request is not the newest"
        assert entry.forced >= old.forced, "a request took the force from another"


def _revived(old: Any, entry: Any, before: Snapshot, after: Snapshot, scanned: bool, reconciled: bool) -> None:
    assert (scanned, old.status, entry.status) == (True, "dead", "pending"), "a scan rewrote a living entry"
    seen = [look.rows.get(entry.source_id) for look in (before, after)]
    changed = any(row is None or not row.indexable or row.revision != old.revision for row in seen)
    transient = old.error_class not in ("input_rejected", "LEASE_ATTEMPTS_EXHAUSTED")
    gone = any(row is None or not row.indexable for row in seen)
    by_change = gone or (changed and old.revision_known)
    assert by_change or (reconciled and transient and not old.dismissed), "the dead was revived and nothing changed"
    assert entry.attempts == entry.crashes == entry.timeouts == 0, "the revived has no attempts"
    assert entry.deaths == old.deaths or by_change, "its deaths are forgotten"


def claimed(before: Snapshot, after: Snapshot, wave: Any, limit: int) -> None:
    """After heal nobody is leased by a closed wave; the wave has due entries, at most `limit`, suspects alone."""
    for slot, entry in after.entries.items():
        if entry.status == "leased":
            holder = after.waves[entry.wave_id]
            assert not _over(holder), f"row {slot} is leased by a wave that is over"
    for slot, old in before.entries.items():
        _healed(old, after.entries[slot], before)
    due = {slot for slot, e in after.entries.items() if e.status == "pending" or (e.status == "retry_wait" and e.ripe)}
    if wave is None:
        assert after.paused or not due, f"nothing was claimed while {due} are due"
        return
    assert not after.paused, "a paused kind was claimed from"
    mine = {e.source_id for e in wave.entries}
    assert mine == after.leased(wave.wave_id), "the wave's entries are not the ones that point at it"
    assert wave.wave_id not in before.waves, "a wave was taken over under its old number"
    assert after.waves[wave.wave_id].claimed == len(mine) <= limit, "the wave is larger than was asked for"
    entries = [after.entries[slot] for slot in mine]
    assert len(mine) == 1 or not any(e.crashes >= 2 or e.timeouts >= 2 for e in entries), "a suspect is not alone"
    _shared(entries, after, limit)
    for slot in mine:
        old = before.entries[slot]
        was_due = old.status == "pending" or (old.status == "retry_wait" and old.ripe)
        assert was_due or (old.status == "leased" and _over(before.waves[old.wave_id])), f"row {slot} was not due"


def _shared(taken: list[Any], after: Snapshot, limit: int) -> None:
    """No scope has more than half of a wave while others wait."""
    for scope, number in Counter(e.scope for e in taken).items():
        left = {
            slot
            for slot, e in after.entries.items()
            if e.status == "pending" and e.scope not in (None, scope) and e.crashes < 2 and e.timeouts < 2
        }
        assert number <= max(1, limit // 2) or not left, f"{scope} took {number} of {limit} while {left} wait"


def _over(wave: Any) -> bool:
    return bool(wave.closed or wave.lapsed)


def _healed(old: Any, entry: Any, before: Snapshot) -> None:
    if old.status != "leased" or not _over(before.waves[old.wave_id]):
        uncharged(old, entry)
        assert entry.status in (old.status, "leased"), "a claim changed what was nobody's"
        return
    wave = before.waves[old.wave_id]
    crash = int(wave.outcome in (None, "expired") and wave.started)
    uncharged(old, entry, but={"crashes": old.crashes + crash, "failures": old.failures + crash})
    dead = old.crashes + crash >= MAX_CRASHES
    assert (entry.status == "dead") == dead, f"an entry with {entry.crashes} crashes is {entry.status}"


def written(
    before: Snapshot, after: Snapshot, wave_id: int, ids: set[str] | None, *, settled: bool, close: bool
) -> None:
    """Each entry of the wave left because its facts are the source's, or is back for a reason, uncharged.

    `settled`: the source is the same since the last look at it.
    """
    held = before.leased(wave_id)
    mine = held if ids is None or close else held & ids  # a wave that is closed gives back the rest
    untouched(before, after, but=mine)
    claimed_at = before.waves[wave_id].claimed_at
    for slot in mine:
        old, entry, plan = before.entries[slot], after.entries.get(slot), before.plans.get((wave_id, slot))
        if entry is None:
            assert plan is not None, f"row {slot} left the queue without a plan"
            assert old.requested_at <= claimed_at, f"row {slot} was requested again and left the queue"
            if settled and slot in after.rows.keys() | after.stamps.keys():
                assert not after.stale(slot), f"row {slot} left the queue and its facts are not the source's"
            continue
        assert entry.status == "pending", f"a write made an entry {entry.status}"
        assert entry.forced == old.forced, f"what was requested of row {slot} lost its force"
        for name in CHARGES:
            assert getattr(entry, name) <= getattr(old, name), f"a write charged row {slot}"
        stamp = after.stamps.get(slot)
        if stamp != before.stamps.get(slot):
            assert plan is not None, f"row {slot} was written without a plan"
            assert stamp is None or stamp.revision == plan.revision, f"row {slot} is stamped with what was not loaded"
    wave = after.waves[wave_id]
    assert (wave.closed, wave.outcome) == (close, "written" if close else None), "the wave's end is not the write's"


def failed(before: Snapshot, after: Snapshot, wave_id: int, deterministic: dict[str, bool]) -> None:
    """One charge each, none for a row that was requested again meanwhile; dead by class or at the last attempt."""
    mine = before.leased(wave_id) & deterministic.keys()
    untouched(before, after, but=mine)
    outcomes: Counter[str] = Counter()
    for slot in mine:
        old, entry = before.entries[slot], after.entries[slot]
        if old.requested_at > before.waves[wave_id].claimed_at:
            assert entry.status == "pending", "an outdated failure is not back"
            uncharged(old, entry)
            continue
        dead = deterministic[slot] or old.attempts + 1 >= MAX_ATTEMPTS
        charge = {"attempts": old.attempts + 1, "failures": old.failures + 1, "deaths": old.deaths + dead}
        uncharged(old, entry, but=charge)
        assert entry.status == ("dead" if dead else "retry_wait"), f"a failure made the entry {entry.status}"
        outcomes["dead" if dead else "failed"] += 1
    for name in ("dead", "failed"):
        new = getattr(after.waves[wave_id], name) - getattr(before.waves[wave_id], name)
        assert new == outcomes[name], f"the wave counts {new} {name} and there are {outcomes[name]}"


def released(before: Snapshot, after: Snapshot, wave_id: int, timed_out: bool) -> None:
    """Nothing is charged but the time-out of a wave that staged nothing."""
    mine, wave = before.leased(wave_id), before.waves[wave_id]
    untouched(before, after, but=mine)
    marks = timed_out and wave.texts == 0
    for slot in mine:
        old, entry = before.entries[slot], after.entries[slot]
        dead = marks and wave.claimed == 1 and old.timeouts >= 2
        charge = {
            "timeouts": old.timeouts + marks,
            "failures": old.failures + marks,
            "deaths": old.deaths + dead,
        }
        uncharged(old, entry, but=charge)
        assert entry.status == ("dead" if dead else "pending"), f"a release made the entry {entry.status}"
    assert after.waves[wave_id].outcome == "released", "a released wave is not closed as such"


def quiet(now: Snapshot, memory: Memory) -> None:
    """Nothing is left to be done, and the facts are the source's."""
    assert not now.feed, "the feed is not empty"
    for slot, entry in now.entries.items():
        assert entry.status == "dead", f"row {slot} is {entry.status} and nothing is due"
        row = now.rows.get(slot)
        assert getattr(row, "indexable", False), f"row {slot} is dead and does not belong in search"
    unrepaired = memory.pruned - now.entries.keys()
    assert not unrepaired, f"rows {unrepaired} were pruned and nobody repaired them"
    for slot in SLOTS:
        if slot not in now.entries:
            assert not now.stale(slot), f"row {slot} is not what the vectors say, and nobody knows"
        row = now.rows.get(slot)
        if row is None or not row.indexable:
            assert not now.chunks.get(slot), f"row {slot} does not belong in search and has chunks"
