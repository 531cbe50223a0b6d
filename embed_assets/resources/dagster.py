"""The resources as Dagster shows them: `postgres`, `outbox`, `embedder`, `chunk_store`, `similar_store`, `operator`.
Thin: each hands a stage of the run to the plain class that does it.

No URL and no key stands in their config, so none is ever shown: they come from the settings (`settings.py`).
What does not belong here: anything that would also be needed without Dagster (`run.py`, `outbox.py`, …).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from dagster import ConfigurableResource, Failure, InitResourceContext, ResourceDependency
from pydantic import PrivateAttr

from embed_assets.errors import ConfigurationError
from embed_assets.models import Backlog, Enqueued, Wave
from embed_assets.resources.backfill import Estimate, Progress
from embed_assets.resources.model_life import NotReady
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.operating import Operating, operating
from embed_assets.resources.portrait import Portrait, portrait
from embed_assets.resources.postgres import STATEMENT_TIMEOUT
from embed_assets.resources.retention import purge
from embed_assets.resources.run import DrainRun, Report
from embed_assets.resources.similar_store import Refreshed, SimilarStore, Waiting
from embed_assets.resources.waiting import interruptible
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PostgresResource(ConfigurableResource):  # type: ignore[type-arg]
    """The database: one worker transaction per step of the protocol, on at most four connections of the run.

    Its teardown gives back every lease that the run still holds: between two steps, nothing else runs on Terminate.
    """

    opened: ResourceDependency[OpenKinds]
    _run_id: str = PrivateAttr(default="")

    def setup_for_execution(self, context: InitResourceContext) -> None:
        self._run_id = context.run.run_id if context.run else ""

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002
        self.opened.end(self._run_id)

    def purge(self, kind: str) -> dict[str, int]:
        """Forget what is older than EMBED_RETENTION_DAYS; rows deleted by table."""
        return self.stage(
            kind, lambda run: purge(run.kind.postgres, days=run.kind.settings.retention_days, stop=run.stop)
        )

    def advance_models(self, kind: str, progress: Callable[[float], None]) -> list[str]:
        """Index, judge, switch; says what was done. `progress` is told each second how far an index is, 0 to 1."""
        return self.stage(kind, lambda run: run.kind.life.advance(run.stop, progress))

    def drop_retired(self, kind: str) -> list[int]:
        """Drop the partitions of models that were retired EMBED_ROLLBACK_DAYS ago; their ids."""
        return self.stage(
            kind, lambda run: run.kind.life.drop_retired(days=run.kind.settings.rollback_days, stop=run.stop)
        )

    def stage(self, kind: str, work: Callable[[DrainRun], T]) -> T:
        """Do a stage of this run in a thread, deaf to nothing; whatever ends it early gives the run's waves back.

        Raises Failure with an operator's message when the configuration is at fault.
        """
        try:
            run = self.opened.run(self._run_id, kind)
            with _released_on_error(run):
                return interruptible(lambda: work(run), run.stop, run.kind.postgres.cancel)
        except ConfigurationError as error:
            raise Failure(str(error), allow_retries=False) from None


@contextmanager
def _released_on_error(run: DrainRun) -> Iterator[None]:
    try:
        yield
    except BaseException:
        try:
            run.release()
        except Exception:  # the error under way says more; the teardown tries again, then the lease lapses
            logger.exception("open waves of the run could not be released")
        raise


class OutboxResource(ConfigurableResource):  # type: ignore[type-arg]
    """The queue: fold, scan, claim with FOR UPDATE SKIP LOCKED. A claimed wave is a lease: a token and an expiry."""

    postgres: PostgresResource

    def enqueue(self, kind: str, *, scan: bool) -> Enqueued:
        return self.postgres.stage(kind, lambda run: run.enqueue(scan=scan))

    def claim(self, kind: str, ancestors: Sequence[str]) -> list[Wave]:
        return self.postgres.stage(kind, lambda run: run.claim(ancestors))

    def backlog(self, kind: str) -> Backlog:
        return self.postgres.stage(kind, lambda run: run.kind.outbox.backlog())


class EmbedderResource(ConfigurableResource):  # type: ignore[type-arg]
    """The embedder. One run at a time asks an endpoint; what it answers is kept in the ledger at once."""

    postgres: PostgresResource

    def stage(self, kind: str, ancestors: Sequence[str]) -> Report:
        """Stage the waves of this run, or what the ancestors left when this is the run's first stage."""

        def work(run: DrainRun) -> Report:
            if not run.resume(staged=False):
                run.reclaim(ancestors)
            return run.stage()

        return self.postgres.stage(kind, work)


class ChunkStoreResource(ConfigurableResource):  # type: ignore[type-arg]
    """The chunk tables: one write transaction per wave, fenced by the wave's token."""

    postgres: PostgresResource

    def write(self, kind: str, ancestors: Sequence[str]) -> Report:
        """Write the staged waves of this run. As the first stage of a re-execution it stages again, from the ledger."""

        def work(run: DrainRun) -> Report:
            staged = Report()
            if not run.resume(staged=True) and run.reclaim(ancestors):
                staged = run.stage()
            written = run.write()
            written.counts += staged.counts
            written.trouble, written.refused = staged.trouble, staged.refused
            return written

        return self.postgres.stage(kind, work)

    def portrait(self, kind: str) -> Portrait:
        """What the asset page shows of the kind as it stands now."""
        return self.postgres.stage(kind, lambda run: portrait(run.kind, run.run_id))

    def invalidations(self, kind: str) -> int:
        """How many rows wait for their neighbours to be computed again, counted up to a limit."""
        return self.postgres.stage(kind, lambda run: run.waiting_invalidations())

    def invalidated(self, kind: str) -> int:
        """How many rows this run settled."""
        return self.postgres.stage(kind, lambda run: run.invalidated())


class SimilarStoreResource(ConfigurableResource):  # type: ignore[type-arg]
    """The tables of neighbours: one probe of the vector index for each chunk of a stale row."""

    postgres: PostgresResource

    def refresh(self, kind: str) -> tuple[Refreshed, Waiting]:
        """What was done in about EMBED_RUN_SECONDS, and what is left."""

        def work(run: DrainRun) -> tuple[Refreshed, Waiting]:
            store = SimilarStore(run.kind.postgres, run.kind.bound)
            return store.refresh(seconds=run.kind.settings.run_seconds, stop=run.stop), store.waiting()

        return self.postgres.stage(kind, work)


class BackfillResource(ConfigurableResource):  # type: ignore[type-arg]
    """Backfills: rows asked for again by buckets, behind every change; followed and estimated."""

    postgres: PostgresResource

    def ask(
        self, kind: str, buckets: Sequence[int], *, selection: str, reason: str
    ) -> tuple[dict[int, int], int, float | None]:
        """Rows asked for by bucket, rows that are ahead of them, and hours until all of that is done, if known."""

        def work(run: DrainRun) -> tuple[dict[int, int], int, float | None]:
            ahead, rate = run.kind.outbox.backlog().due, run.kind.outbox.rows_per_second()
            asked = run.kind.backfill.ask(buckets, selection=selection, reason=reason, run_id=run.run_id, stop=run.stop)
            return asked, ahead, (ahead + sum(asked.values())) / rate / 3600 if rate else None

        return self.postgres.stage(kind, work)

    def progress(self, kind: str) -> list[Progress]:
        return self.postgres.stage(kind, lambda run: run.kind.backfill.progress())

    def estimate(self, kind: str, selection: str) -> Estimate:
        return self.postgres.stage(kind, lambda run: run.kind.estimate(selection))


class OperatorResource(ConfigurableResource):  # type: ignore[type-arg]
    """What operators and checks do to a kind. Needs no embedder, so it works while the endpoint does not."""

    opened: ResourceDependency[OpenKinds]

    def act(self, kind: str, work: Callable[[Operating], T], *, statement_timeout: str = STATEMENT_TIMEOUT) -> T:
        """Do it in a thread, deaf to nothing. Raises Failure with an operator's message where he must decide."""
        settings, registry = self.opened.settings, self.opened.registry
        try:
            with operating(settings, registry, kind, statement_timeout=statement_timeout) as found:
                return interruptible(lambda: work(found), Stop(), found.postgres.cancel)
        except (ConfigurationError, NotReady) as error:
            raise Failure(str(error), allow_retries=False) from None
