"""One kind, assembled from settings: database, declaration, queue, chunk store, embedder. The assets and the
command line both start here."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace

from embed_assets.corpus import Registry, TableCorpus
from embed_assets.embedding import Embedder
from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.migrate import migrate
from embed_assets.pipeline import Limits
from embed_assets.ports import Ports
from embed_assets.resources.chunk_store import ChunkStore
from embed_assets.resources.declaration import BoundCorpus, bind
from embed_assets.resources.embedder import Endpoint, make_embedder
from embed_assets.resources.enqueuer import Enqueuer
from embed_assets.resources.lease import LeaseKeeper
from embed_assets.resources.outbox import Outbox
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_model, make_tables
from embed_assets.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """Everything that maintains one kind. `close` gives back its connections and ends its heartbeat."""

    settings: Settings
    postgres: Postgres
    bound: BoundCorpus
    identity: str
    model_id: int
    outbox: Outbox
    enqueuer: Enqueuer
    chunks: ChunkStore
    embedder: Embedder
    endpoint: Endpoint
    keeper: LeaseKeeper

    @property
    def ports(self) -> Ports:
        return Ports(
            corpus=self.bound.corpus,
            enqueuer=self.enqueuer,
            outbox=self.outbox,
            chunks=self.chunks,
            embedder=self.embedder,
            endpoint=self.endpoint,
            keeper=self.keeper,
        )

    @property
    def limits(self) -> Limits:
        return Limits(rows=self.settings.batch_size, wave_seconds=self.settings.call_timeout_seconds)

    def close(self) -> None:
        self.keeper.close()
        self.embedder.close()
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
    module, _, attribute = name.partition(":")
    try:
        corpus = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise DeclarationError(
            f"EMBED_CORPORA names '{name}', which cannot be imported: {error}. Write it as package.module:name."
        ) from None
    if not isinstance(corpus, TableCorpus):
        raise DeclarationError(f"EMBED_CORPORA names '{name}', which is no TableCorpus but {type(corpus).__name__}.")
    return corpus


def open_kind(
    settings: Settings, corpus: TableCorpus, *, url: str | None = None, embedder: Embedder | None = None
) -> Kind:
    """Migrate, check the declaration, make what is missing, and assemble. `embedder` stands in for the settings'.

    Raises ConfigurationError (DeclarationError for the declaration) before anything of the kind is made.
    """
    url = url or database_url(settings)
    migrate(url)
    postgres = Postgres(url)
    if settings.prefix_by == "server":
        corpus = replace(corpus, prefix=corpus.prefix.removeprefix("passage: "))
    bound = bind(postgres, corpus)
    embedder = embedder or make_embedder(settings)
    identity = corpus.identity_of(embedder.identity)
    make_tables(postgres, bound)
    model_id = make_model(postgres, bound, identity, embedder.dimensions)
    return assemble(settings, postgres, bound, embedder, identity, model_id)


def assemble(
    settings: Settings,
    postgres: Postgres,
    bound: BoundCorpus,
    embedder: Embedder,
    identity: str,
    model_id: int,
) -> Kind:
    """The parts of a kind whose tables and model exist."""
    outbox = Outbox(
        postgres,
        bound,
        [model_id],
        lease_seconds=settings.lease_seconds,
        max_attempts=settings.max_attempts,
        reconcile_seconds=settings.reconcile_seconds,
    )
    return Kind(
        settings=settings,
        postgres=postgres,
        bound=bound,
        identity=identity,
        model_id=model_id,
        outbox=outbox,
        enqueuer=Enqueuer(postgres, bound, [model_id], reconcile_seconds=settings.reconcile_seconds),
        chunks=ChunkStore(postgres, bound),
        embedder=embedder,
        endpoint=Endpoint(postgres, settings),
        keeper=LeaseKeeper(outbox),
    )


def find_corpus(settings: Settings, kind: str) -> TableCorpus:
    """The declaration of a kind. Raises DeclarationError naming the kinds that exist."""
    registry = load_registry(settings)
    if not registry.kinds:
        raise ConfigurationError("EMBED_CORPORA names no corpus. Unset it to use the built-in jobs.")
    return registry[kind]
