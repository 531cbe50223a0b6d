"""The stages, in order: enqueue, claim, stage (load, clean, chunk, embed), write. And the loop over them.

Knows neither SQL nor Dagster: the assets and `embed-assets drain` run these same functions on `ports.py`.
Who pays for a failure is decided by its class (`errors.RULES`) and by the state of the wave's scope (`Stop`),
never by an error's text.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from embed_assets.corpus import SMALLEST_CHUNK
from embed_assets.embedding import Embedded
from embed_assets.errors import (
    Cancelled,
    ClassifiedError,
    CorruptRow,
    DatabaseTrouble,
    EndpointTrouble,
    ErrorClass,
    InputTooLong,
    LeaseLost,
    RowRejected,
    TooLarge,
    WaveTimeout,
)
from embed_assets.models import Counts, Enqueued, Failure, Plan, SourceRow, Wave
from embed_assets.ports import Ports
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

UNMEASURED_ROWS = 8
FRUITLESS_WAVES = 20
TRIP_TEXTS = 10
GuiltyRow = (RowRejected, CorruptRow)


@dataclass(frozen=True)
class Limits:
    """`rows` per wave; `wave_seconds`: a wave's budget (≤ 0: none); `waves`, `rows_in_all`: of one run, 0 for all.

    `scope`: claim, take back and bury only this one's entries.
    """

    rows: int = 500
    wave_seconds: float = 600
    waves: int = 0
    rows_in_all: int = 0
    scope: str | None = None


def stage(ports: Ports, wave: Wave, stop: Stop) -> Counts:
    """Load, clean, chunk and embed a wave, slice by slice; every finished request is kept in the ledger at once."""
    started = time.monotonic()
    ports.outbox.start(wave)
    counts = Counts(claimed=len(wave.entries))
    try:
        for ids in _slices(ports, wave):
            stop.check()
            _stage_slice(ports, wave, ids, counts, stop)
    finally:
        if counts.texts or stop.reason() is None:
            _quietly(lambda: ports.outbox.staged(wave, counts, seconds=time.monotonic() - started))
    return counts


def write(ports: Ports, wave: Wave, stop: Stop) -> Counts:
    """Write a staged wave in one transaction; when a row is guilty, halves in transactions of their own find it."""
    stop.check()
    try:
        return ports.chunks.write(wave, stop=stop)
    except GuiltyRow:
        counts = _write_part(ports, wave, sorted(wave.source_ids), stop)
        return counts + ports.chunks.write(wave, ids=[], stop=stop)


def work(ports: Ports, wave: Wave, limits: Limits, stop: Stop) -> Counts:
    """One wave from start to close."""
    scope = stop.child(seconds=limits.wave_seconds)
    ports.keeper.hold(wave, scope)
    return guarded(ports, wave, scope, lambda: stage(ports, wave, scope) + write(ports, wave, scope))


def guarded(ports: Ports, wave: Wave, scope: Stop, steps: Callable[[], Counts], *, last: bool = True) -> Counts:
    """Run steps of a wave, and settle the wave by what became of them.

    Raises Cancelled, EndpointTrouble and DatabaseTrouble after the wave was released, and whatever is unexpected
    without releasing it (the lease lapses and the crash is counted). `last`: the wave is closed after these steps, so
    its heartbeat ends.
    """
    try:
        counts = steps()
    except Exception as error:
        ports.keeper.drop(wave)
        return _settle(ports, wave, scope.reason() or error)
    except BaseException:
        scope.cancel()
        ports.keeper.drop(wave)
        ports.outbox.release(wave)
        raise
    if last:
        ports.keeper.drop(wave)
    return counts


def _settle(ports: Ports, wave: Wave, error: Exception) -> Counts:
    if isinstance(error, EndpointTrouble):
        ports.endpoint.rest(error)
    if isinstance(error, LeaseLost):
        logger.warning("wave %s: the lease was lost, nothing is written", wave.wave_id)
        return Counts(lost=len(wave.entries))
    if isinstance(error, (Cancelled, EndpointTrouble, DatabaseTrouble)):
        ports.outbox.release(wave)
        raise error
    if isinstance(error, WaveTimeout):
        logger.warning("wave %s: its time is used up, released", wave.wave_id)
        return ports.outbox.release(wave, timed_out=True)
    raise error


def claim(
    ports: Ports,
    run_id: str,
    limits: Limits,
    *,
    failed_before: datetime,
    ancestors: Sequence[str] = (),
    stop: Stop | None = None,
) -> Iterator[Wave]:
    """Waves, until a claim is empty and a count says so too, or a limit is reached."""
    stop = stop or Stop()
    waves = rows = 0
    while (not limits.waves or waves < limits.waves) and (not limits.rows_in_all or rows < limits.rows_in_all):
        left = limits.rows_in_all - rows if limits.rows_in_all else limits.rows
        wave = ports.outbox.claim(
            run_id, min(limits.rows, left), failed_before=failed_before, ancestors=ancestors, scope=limits.scope
        )
        if wave is None:
            if ancestors or not ports.outbox.claimable(failed_before=failed_before, scope=limits.scope):
                return
            stop.sleep(0.2)  # what is due was locked by somebody just now
            continue
        waves, rows = waves + 1, rows + len(wave.entries)
        yield wave


def drain(
    ports: Ports,
    run_id: str,
    *,
    limits: Limits,
    stop: Stop,
    scan: bool = True,
    allow_clear: bool = False,
    on_enqueued: Callable[[Enqueued], None] = lambda enqueued: None,
    report: Callable[[Wave, Counts, Counts], None] = lambda wave, counts, total: None,
) -> tuple[Enqueued, Counts]:
    """Enqueue once, then wave after wave until nothing is due but what failed since this drain began.

    Ends, and says so, after 20 waves in a row that settled nothing: rows that always come back would keep it for ever.
    """
    began = ports.outbox.now()
    enqueued = ports.enqueuer.enqueue(scan=scan, allow_clear=allow_clear, stop=stop)
    on_enqueued(enqueued)
    total, fruitless = Counts(), 0
    for wave in claim(ports, run_id, limits, failed_before=began, stop=stop):
        counts = work(ports.of(wave), wave, limits, stop)
        total += counts
        report(wave, counts, total)
        fruitless = 0 if counts.settled else fruitless + 1
        if fruitless == FRUITLESS_WAVES:
            logger.warning(
                "%s: %s waves in a row settled nothing, their rows came back each time; the rest is left to the next "
                "drain. Either they change all the time (a `revision` with a clock in it does), or something empties "
                "embed_assets.wave_chunks or chunk_embeddings",
                wave.kind,
                fruitless,
            )
            break
    return enqueued, total


def _slices(ports: Ports, wave: Wave) -> Iterator[list[str]]:
    """The store's slices; a few rows each where not even the sizes can be read, for `_load` to find the guilty one."""
    try:
        yield from ports.chunks.slices(wave)
    except GuiltyRow:
        ids = sorted(wave.source_ids)
        yield from (ids[start : start + UNMEASURED_ROWS] for start in range(0, len(ids), UNMEASURED_ROWS))


def _stage_slice(ports: Ports, wave: Wave, ids: list[str], counts: Counts, stop: Stop) -> None:
    rows, failures = _load(ports, wave, ids)
    plans: list[Plan] = []
    for row in rows:
        try:
            plans.append(ports.corpus.plan(row))
        except TooLarge as error:
            failures.append(_failure(row, error))
    by_id = {row.source_id: row for row in rows}
    failures += _embed(ports, wave, plans, by_id, counts, stop)
    if failures:
        _add(counts, ports.outbox.fail(wave, failures))


def _load(ports: Ports, wave: Wave, ids: list[str]) -> tuple[list[SourceRow], list[Failure]]:
    """Rows that can be read, and those that cannot, found by halving."""
    try:
        return ports.chunks.load(wave, ids), []
    except GuiltyRow as error:
        if len(ids) == 1:
            return [], [Failure(ids[0], error)]
        half = len(ids) // 2
        left, right = _load(ports, wave, ids[:half]), _load(ports, wave, ids[half:])
        return left[0] + right[0], left[1] + right[1]


def _embed(
    ports: Ports, wave: Wave, plans: list[Plan], rows: dict[str, SourceRow], counts: Counts, stop: Stop
) -> list[Failure]:
    """Plan, buy what is missing, and chunk rows smaller of which a text was too long for the endpoint."""
    failures: list[Failure] = []
    size = ports.corpus.max_chars
    first = True
    while plans:
        missing = ports.chunks.plan(wave, plans)
        if first:
            counts.chunks += sum(len(plan.chunks) for plan in plans)
            counts.reused += sum(chunk.text_hash not in missing for plan in plans for chunk in plan.chunks)
            _quietly(lambda: ports.outbox.progress(wave, counts))
        rejected = _buy(ports, wave, plans, missing, counts, stop)
        _trip(ports, plans, rejected)
        size, first = size // 2, False
        plans, guilty = _judge(ports, plans, rows, rejected, size)
        failures += guilty
    return failures


def _buy(
    ports: Ports, wave: Wave, plans: Iterable[Plan], missing: set[bytes], counts: Counts, stop: Stop
) -> dict[bytes, ClassifiedError]:
    """Embed each missing text once; returns why some were refused, by hash."""
    texts = {chunk.text_hash: chunk.sent for plan in plans for chunk in plan.chunks if chunk.text_hash in missing}
    hashes = list(texts)
    rejected: dict[bytes, ClassifiedError] = {}
    if not hashes:
        return rejected
    began, sent = time.monotonic(), ports.embedder.texts_sent
    try:
        for result in ports.embedder.embed(list(texts.values()), stop=stop):
            mine = [hashes[position] for position in result.positions]
            if isinstance(result, Embedded):
                ports.chunks.keep(wave, mine, result.vectors, tokens=result.tokens)
                counts.texts += len(mine)
                counts.tokens += result.tokens
            else:
                rejected.update(dict.fromkeys(mine, result.error))
    finally:
        counts.sent += ports.embedder.texts_sent - sent
    ports.endpoint.works(seconds=time.monotonic() - began)
    return rejected


def _trip(ports: Ports, plans: Iterable[Plan], rejected: dict[bytes, ClassifiedError]) -> None:
    """Where more than half of the texts fail alike, it is the endpoint that fails, however well it answers a probe.

    Texts that were too long say nothing of it. Raises EndpointTrouble.
    """
    alike = Counter(error.code for error in rejected.values() if not isinstance(error, InputTooLong))
    for code, failing in alike.most_common(1):
        texts = len({chunk.text_hash for plan in plans for chunk in plan.chunks})
        if failing >= TRIP_TEXTS and failing * 2 > texts and ports.endpoint.trip(code):
            raise EndpointTrouble(
                f"{failing} of {texts} texts fail alike at the embedding endpoint ({code}), though it answers others. "
                "No row is charged. Look at the endpoint's log; if it fails so again, the rows will be.",
                error_class=ErrorClass.CONTRACT,
                code=code,
            )


def _judge(
    ports: Ports,
    plans: Iterable[Plan],
    rows: dict[str, SourceRow],
    rejected: dict[bytes, ClassifiedError],
    size: int,
) -> tuple[list[Plan], list[Failure]]:
    """Of the rows with a refused text: those to chunk smaller, and those that fail."""
    again: list[Plan] = []
    failures: list[Failure] = []
    for plan in plans:
        errors = [rejected[chunk.text_hash] for chunk in plan.chunks if chunk.text_hash in rejected]
        if not errors:
            continue
        fatal = [error for error in errors if not isinstance(error, InputTooLong)]
        row = rows[plan.source_id]
        if fatal or size < SMALLEST_CHUNK:
            failures.append(_failure(row, (fatal or errors)[0]))
            continue
        try:
            again.append(ports.corpus.plan(row, max_chars=size))
        except TooLarge as error:
            failures.append(_failure(row, error))
    return again, failures


def _write_part(ports: Ports, wave: Wave, ids: list[str], stop: Stop) -> Counts:
    stop.check()
    try:
        return ports.chunks.write(wave, ids=ids, close=False, stop=stop)
    except GuiltyRow as error:
        if len(ids) == 1:
            return ports.outbox.fail(wave, [Failure(ids[0], error)])
        half = len(ids) // 2
        return _write_part(ports, wave, ids[:half], stop) + _write_part(ports, wave, ids[half:], stop)


def _failure(row: SourceRow, error: ClassifiedError) -> Failure:
    return Failure(row.source_id, error, row.revision, revision_known=True)


def _add(counts: Counts, more: Counts) -> None:
    counts.failed += more.failed
    counts.dead += more.dead
    counts.back += more.back


def _quietly(action: Callable[[], None]) -> None:
    """Bookkeeping that must not hide the error that is under way."""
    try:
        action()
    except Exception:
        logger.exception("the wave's counters could not be kept")
