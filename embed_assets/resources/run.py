"""One drain run of one kind: the waves it holds from claim to write, and the order of what is done with them.

Knows nothing of Dagster. Each stage may be the first one: in a re-execution it takes up what the ancestors left.
What does not belong here: the stages themselves (`pipeline`) and the queue's transitions (`outbox`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from embed_assets import pipeline
from embed_assets.errors import Cancelled, ConfigurationError, DatabaseTrouble, EndpointTrouble, ErrorClass
from embed_assets.models import Counts, Enqueued, Wave
from embed_assets.pipeline import Limits
from embed_assets.resources.assembly import Kind, Maintained
from embed_assets.resources.outbox import BACKLOG_LIMIT, EVER, Outbox
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

REFUSED = {ErrorClass.REFUSED, ErrorClass.CONTRACT}


@dataclass
class Held:
    """An open wave of this run. `lease` ends with the lease or the run; each stage gets a budget inside it."""

    wave: Wave
    lease: Stop
    staged: bool = False


@dataclass
class Report:
    """What a stage did. `trouble`: why it ended early; `refused`: whether an operator must act on that."""

    counts: Counts = field(default_factory=Counts)
    waves: int = 0
    released: int = 0
    trouble: str | None = None
    refused: bool = False


def run_limits(kind: Kind, outbox: Outbox | None = None) -> Limits:
    """Rows for about EMBED_RUN_SECONDS at the recent rate, but at least one wave; one while the rate is unknown."""
    rows, waves = kind.settings.batch_size, kind.settings.waves_per_run
    rate = (outbox or kind.outbox).rows_per_second() or 0.0
    return replace(
        kind.limits, waves=waves, rows_in_all=min(max(int(rate * kind.settings.run_seconds), rows), rows * waves)
    )


class DrainRun:
    """The waves of one run in this process. Everything but `release` raises Cancelled once `stop` is cancelled."""

    def __init__(self, kind: Kind, run_id: str) -> None:
        self.kind = kind
        self.run_id = run_id
        self.stop = Stop()
        self._held: dict[int, Held] = {}
        self._lapsing: set[int] = set()
        self._claimed_here = False

    def enqueue(self, *, scan: bool = False) -> Enqueued:
        """Fold the feed and scan the source if that is due (or `scan`)."""
        return self.kind.enqueuer.enqueue(scan=scan, stop=self.stop)

    def claim(self, ancestors: Sequence[str] = ()) -> list[Wave]:
        """Waves for about a minute's work. What `ancestors` (runs that this one repeats) left comes first."""
        waves = self.reclaim(ancestors)
        limits = run_limits(self.kind)
        rows = limits.rows_in_all - sum(len(wave.entries) for wave in waves)
        if rows > 0 and len(waves) < limits.waves:
            waves += self._claim(replace(limits, waves=limits.waves - len(waves), rows_in_all=rows), ())
        return waves

    def reclaim(self, ancestors: Sequence[str]) -> list[Wave]:
        """Close the open waves of the ancestors and claim what they left, as new waves; empty if others took it."""
        if not ancestors:
            return []
        self.kind.outbox.release_runs(ancestors)
        return self._claim(replace(self.kind.limits, waves=self.kind.settings.waves_per_run), ancestors)

    def _claim(self, limits: Limits, ancestors: Sequence[str]) -> list[Wave]:
        waves = []
        claims = pipeline.claim(self.kind.ports, self.run_id, limits, failed_before=EVER, ancestors=ancestors)
        self._claimed_here = True
        for wave in claims:
            self._hold(wave)
            waves.append(wave)
            self.stop.check()
        return waves

    def _hold(self, wave: Wave, *, staged: bool = False) -> None:
        held = Held(wave, self.stop.child(), staged)
        self._held[wave.wave_id] = held
        self.kind.keeper.hold(wave, held.lease)

    def resume(self, *, staged: bool) -> int:
        """Take up this run's open waves when another process of it claimed them; returns how many are held.

        Raises ConfigurationError when that process has given them back: then no step could ever do anything.
        """
        if not self._claimed_here:
            for wave in self.kind.outbox.waves_of(self.run_id):
                self._hold(wave, staged=staged)
            if not self._held and self._has_claimed():
                raise ConfigurationError(
                    "The waves that this run claimed were given back between its steps, because each step had a "
                    "process of its own. Run the assets with Dagster's in_process_executor."
                )
        return len(self._held)

    def _has_claimed(self) -> bool:
        values = {"kind": self.kind.outbox.kind, "runs": [self.run_id]}
        return self.kind.postgres.one("watch.waves_of_runs", values) is not None

    def invalidated(self) -> int:
        """Rows that this run settled, whose neighbours must be computed again."""
        row = self.kind.postgres.one("watch.invalidated_by", {"kind": self.kind.outbox.kind, "run_id": self.run_id})
        return int(row["invalidated"]) if row else 0

    def waiting_invalidations(self) -> int:
        """Rows whose neighbours wait to be computed again; the limit means "at least"."""
        values = {"kind": self.kind.outbox.kind, "limit": BACKLOG_LIMIT}
        row = self.kind.postgres.one("watch.invalidations", values)
        return int(row["waiting"]) if row else 0

    def stage(self) -> Report:
        """Stage every wave held, one run per endpoint at a time. At an endpoint's trouble its waves are released."""
        report = Report()
        for model in self.kind.models:
            todo = [held for held in self._held.values() if not held.staged and held.wave.model_id == model.model_id]
            if todo:
                self._stage_of(model, todo, report)
        return report

    def _stage_of(self, model: Maintained, todo: Sequence[Held], report: Report) -> None:
        trouble = None
        try:
            with model.endpoint.turn(self.stop):
                for held in todo:
                    if trouble := self._resting(model, report):
                        break
                    report.counts += self._guarded(held, pipeline.stage, last=False)
                    report.waves += held.staged
        except EndpointTrouble as error:
            trouble = str(error)
            report.refused = report.refused or error.error_class in REFUSED
        if trouble:
            report.trouble = trouble
            report.released += self._release([held for held in todo if not held.staged])

    def _resting(self, model: Maintained, report: Report) -> str | None:
        rest = model.endpoint.resting()
        if rest is None:
            return None
        report.refused = report.refused or rest.state == "refused"
        return f"the endpoint is {rest.state} for {rest.seconds:.0f} s more: {rest.reason}"

    def write(self) -> Report:
        """Write every staged wave, each in its own transaction."""
        report = Report()
        for held in [held for held in self._held.values() if held.staged]:
            report.counts += self._guarded(held, pipeline.write, last=True)
            report.waves += 1
        return report

    def _guarded(self, held: Held, step: Callable[..., Counts], *, last: bool) -> Counts:
        """One stage of one wave. Whether it went through decides whether the wave is still held."""
        wave = held.wave
        ports = self.kind.ports.of(wave)
        scope = held.lease.child(seconds=self.kind.limits.wave_seconds)
        done = []

        def steps() -> Counts:
            counts = step(ports, wave, scope)
            done.append(True)
            return counts

        with self._lapse_on_defect(wave):
            counts = pipeline.guarded(ports, wave, scope, steps, last=last)
        held.staged = bool(done)
        if last or not done:
            self._held.pop(wave.wave_id, None)
        return counts

    @contextmanager
    def _lapse_on_defect(self, wave: Wave) -> Iterator[None]:
        """What is unexpected leaves the wave to lapse, so that the crash is counted; nobody may release it."""
        try:
            yield
        except (Cancelled, EndpointTrouble, DatabaseTrouble):
            raise
        except Exception:
            self._lapsing.add(wave.wave_id)
            raise

    def _release(self, held: Sequence[Held]) -> int:
        for one in held:
            self.kind.keeper.drop(one.wave)
            self._held.pop(one.wave.wave_id, None)
            self.kind.outbox.release(one.wave)
        return len(held)

    def release(self) -> int:
        """Give back every open wave of this run, charging nobody; those of a defect lapse. Safe to repeat."""
        self.stop.cancel()
        for held in list(self._held.values()):
            self.kind.keeper.drop(held.wave)
        self._held.clear()
        released = self.kind.outbox.release_runs([self.run_id], lapsing=self._lapsing)
        if released:
            logger.info("%s: %s open waves of this run are released", self.kind.outbox.kind, released)
        return released
