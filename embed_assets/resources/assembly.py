"""One kind, assembled from settings: database, declaration, queue, chunk store, embedder. The assets and the
command line both start here."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from embed_assets.corpus import Registry, TableCorpus
from embed_assets.embedding import Embedder
from embed_assets.embedding.shared import Rest
from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.migrate import migrate
from embed_assets.pipeline import Limits
from embed_assets.ports import Ports
from embed_assets.resources.backfill import Backfill, Estimate
from embed_assets.resources.chunk_store import ChunkStore
from embed_assets.resources.declaration import BoundCorpus, bind
from embed_assets.resources.embedder import Endpoint, make_embedder, resting
from embed_assets.resources.enqueuer import Enqueuer
from embed_assets.resources.lease import LeaseKeeper
from embed_assets.resources.model_life import ModelLife
from embed_assets.resources.outbox import Outbox
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.resources.target import RetiredModel, make_model
from embed_assets.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Maintained:
    """A model that this process keeps fresh: by which embedder and settings, and the corpus as they want it."""

    model_id: int
    identity: str
    settings: Settings
    corpus: TableCorpus
    embedder: Embedder
    endpoint: Endpoint


@dataclass(frozen=True)
class Kind:
    """Everything that maintains one kind. `close` gives back its connections and ends its heartbeat.

    `models`: the one of the settings first, then the active one where that is another and has an embedder.
    """

    settings: Settings
    postgres: Postgres
    bound: BoundCorpus
    models: tuple[Maintained, ...]
    outbox: Outbox
    enqueuer: Enqueuer
    chunks: ChunkStore
    keeper: LeaseKeeper
    life: ModelLife

    @property
    def identity(self) -> str:
        return self.models[0].identity

    @property
    def model_id(self) -> int:
        return self.models[0].model_id

    @property
    def embedder(self) -> Embedder:
        return self.models[0].embedder

    @property
    def ports(self) -> Ports:
        first, *others = self.models
        return self._ports(first, {other.model_id: self._ports(other, {}) for other in others})

    def _ports(self, model: Maintained, others: Mapping[int, Ports]) -> Ports:
        return Ports(
            corpus=model.corpus,
            enqueuer=self.enqueuer,
            outbox=self.outbox,
            chunks=self.chunks,
            embedder=model.embedder,
            endpoint=model.endpoint,
            keeper=self.keeper,
            others=others,
        )

    def resting(self) -> Rest | None:
        """Why nothing can be embedded now; None as soon as one of the endpoints may be asked."""
        return resting([model.endpoint for model in self.models])

    @property
    def backfill(self) -> Backfill:
        return Backfill(self.postgres, self.bound, self.outbox.models)

    def estimate(self, selection: str) -> Estimate:
        """What it takes to embed the rows of `selection` (`all` or `stale`) by the model of the settings."""
        rate = self.outbox.rows_per_second()
        return self.backfill.estimate(dimensions=self.embedder.dimensions, rows_per_second=rate, selection=selection)

    @property
    def limits(self) -> Limits:
        return Limits(rows=self.settings.batch_size, wave_seconds=self.settings.call_timeout_seconds)

    def close(self) -> None:
        self.keeper.close()
        for model in self.models:
            model.embedder.close()
        self.postgres.close()


def database_url(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server's address; the server is started when it is not up."""
    if settings.database_url:
        return settings.database_url.get_secret_value()
    from embed_assets import server

    return server.ensure(settings.home_path)


def load_registry(settings: Settings) -> Registry:
    """The corpora of EMBED_CORPORA (`module:name`, several by commas). Raises DeclarationError."""
    return Registry([_load(name.strip()) for name in settings.corpora.split(",") if name.strip()])


def _load(name: str) -> TableCorpus:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise DeclarationError(f"EMBED_CORPORA names '{name}'. Write it as package.module:name.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # a module beside the user, as `python -m` finds it
    try:
        corpus = getattr(importlib.import_module(module), attribute)
    except DeclarationError:
        raise
    except ModuleNotFoundError as error:
        raise DeclarationError(
            f"EMBED_CORPORA names '{name}', which cannot be imported: {error}. It is looked for in the current folder, "
            "in PYTHONPATH and among what is installed."
        ) from None
    except Exception as error:  # whatever the user's own module does when it is read
        raise DeclarationError(
            f"EMBED_CORPORA names '{name}', which cannot be imported: {type(error).__name__}: {error}{_where(error)}."
        ) from None
    if not isinstance(corpus, TableCorpus):
        raise DeclarationError(f"EMBED_CORPORA names '{name}', which is no TableCorpus but {type(corpus).__name__}.")
    return corpus


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def open_kind(
    settings: Settings,
    corpus: TableCorpus,
    *,
    url: str | None = None,
    embedder: Embedder | None = None,
    active_embedder: Embedder | None = None,
    embeds: bool = True,
) -> Kind:
    """Migrate, check the declaration, make what is missing, and assemble. `embedder` stands in for the settings'.

    `embeds` makes the settings' model the target. Who only looks or operates takes the target as it stands: a slip in
    a variable must not give up a model that is being built. Raises ConfigurationError (DeclarationError for the
    declaration) before anything of the kind is made.
    """
    url = url or database_url(settings)
    migrate(url)
    postgres = Postgres(url)
    bound = bind(postgres, as_sent(corpus, settings))
    embedder = embedder or make_embedder(settings, shared=Endpoint(postgres, settings))
    make_tables(postgres, bound)
    if not embeds and (target := postgres.one("corpus.identity_of_target", {"kind": corpus.kind})):
        endpoint = Endpoint(postgres, settings)
        standing = Maintained(target["id"], target["identity"], settings, bound.corpus, embedder, endpoint)
        return assemble(settings, postgres, bound, [standing])
    active = _active(settings, postgres, corpus, active_embedder)
    try:
        model = maintained(settings, postgres, bound, corpus, embedder)
    except RetiredModel as retired:
        embedder.close()
        if active is None:
            raise
        logger.warning("%s. Only the active model is kept fresh, by EMBED_ACTIVE_*", retired)
        return assemble(settings, postgres, bound, [active])
    if active is None or active.model_id == model.model_id:
        return assemble(settings, postgres, bound, [model])
    return assemble(settings, postgres, bound, [model, active])


def maintained(
    settings: Settings, postgres: Postgres, bound: BoundCorpus, corpus: TableCorpus, embedder: Embedder
) -> Maintained:
    """The model of an embedder, its tables made. Raises ConfigurationError, RetiredModel where it was retired."""
    corpus = as_sent(corpus, settings)
    identity = corpus.identity_of(embedder.identity)
    model_id = make_model(postgres, bound, identity, embedder.dimensions)
    return Maintained(model_id, identity, settings, corpus, embedder, Endpoint(postgres, settings))


def as_sent(corpus: TableCorpus, settings: Settings) -> TableCorpus:
    """Where the server puts the prefix of passages before a text, we must not."""
    if settings.prefix_by == "client":
        return corpus
    return replace(corpus, prefix=corpus.prefix.removeprefix("passage: "))


def query_embedders(settings: Settings, corpus: TableCorpus) -> dict[str, Embedder]:
    """Who embeds the questions to which model, by its identity: that of the settings, and that of EMBED_ACTIVE_*."""
    found: dict[str, Embedder] = {}
    for known in (settings, settings.of_active()):
        if known is not None:
            embedder = make_embedder(known, for_queries=True)
            found.setdefault(as_sent(corpus, known).identity_of(embedder.identity), embedder)
    return found


def _active(
    settings: Settings, postgres: Postgres, corpus: TableCorpus, embedder: Embedder | None
) -> Maintained | None:
    """The active model by the embedder of EMBED_ACTIVE_*, while that is the one it was made by."""
    of_active = settings.of_active() or (settings if embedder else None)
    active = postgres.one("corpus.identity_of_active", {"kind": corpus.kind})
    if of_active is None or active is None:
        return None
    embedder = embedder or make_embedder(of_active, shared=Endpoint(postgres, of_active))
    corpus = as_sent(corpus, of_active)
    if (identity := corpus.identity_of(embedder.identity)) != active["identity"]:
        embedder.close()
        logger.warning("EMBED_ACTIVE_* names %s, but the active model is %s", identity, active["identity"])
        return None
    return Maintained(active["id"], identity, of_active, corpus, embedder, Endpoint(postgres, of_active))


def assemble(settings: Settings, postgres: Postgres, bound: BoundCorpus, models: Sequence[Maintained]) -> Kind:
    """The parts of a kind whose tables and models exist."""
    # The active model's entries are claimed first: there are few of them, and search waits for them.
    ids = [model.model_id for model in reversed(models)]
    outbox = Outbox(
        postgres,
        bound,
        ids,
        lease_seconds=settings.lease_seconds,
        max_attempts=settings.max_attempts,
        reconcile_seconds=settings.reconcile_seconds,
    )
    return Kind(
        settings=settings,
        postgres=postgres,
        bound=bound,
        models=tuple(models),
        outbox=outbox,
        enqueuer=Enqueuer(
            postgres,
            bound,
            ids,
            lease_seconds=settings.lease_seconds,
            reconcile_seconds=settings.reconcile_seconds,
        ),
        chunks=ChunkStore(postgres, bound),
        keeper=LeaseKeeper(outbox),
        life=ModelLife(postgres, bound, settings),
    )


def find_corpus(settings: Settings, kind: str) -> TableCorpus:
    """The declaration of a kind. Raises DeclarationError naming the kinds that exist."""
    registry = load_registry(settings)
    if not registry.kinds:
        raise ConfigurationError("EMBED_CORPORA names no corpus. Unset it to use the built-in jobs.")
    return registry[kind]
