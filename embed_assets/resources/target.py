"""Who may become the target: the model of the settings, its partition made and attached, unless it was retired.

What does not belong here: what becomes of a target (`model_life`).
"""

from __future__ import annotations

import logging
from typing import Any

from psycopg import Cursor

from embed_assets.errors import ConfigurationError
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.tables import maintainer, make_partition

logger = logging.getLogger(__name__)


class RetiredModel(ConfigurationError):
    """The model of the settings was retired: no process brings it back by starting."""


@maintainer
def make_model(postgres: Postgres, bound: BoundCorpus, identity: str, dimensions: int) -> int:
    """The id of an embedder identity, its partition made and attached. It becomes the target, unless it is active.

    A process that still runs with the active model does not give up the one that is being built. Raises
    ConfigurationError when the identity is known with another width, or was retired.
    """
    model_id = _model_id(postgres, identity, dimensions)
    ids = {"kind": bound.kind, "model_id": model_id}
    standing = postgres.one("models.standing", ids)
    _refuse_retired(standing, bound, identity)
    make_partition(postgres, bound, model_id, dimensions)
    if standing is None or standing["dropped"] or not (standing["active"] or standing["target"]):
        postgres.retrying(lambda cursor: _admit(cursor, ids, bound, identity))
    return model_id


def _admit(cursor: Cursor[Row], ids: dict[str, Any], bound: BoundCorpus, identity: str) -> None:
    """Under the kind's lock, where nobody retires it meanwhile: two that start at once come one after the other."""
    locked(cursor, bound.kind)
    standing = cursor.execute(query("models.standing"), ids).fetchone()
    _refuse_retired(standing, bound, identity)
    cursor.execute(query("models.add_corpus_model"), ids)
    if standing is None or not (standing["active"] or standing["target"]):
        make_target(cursor, ids)


def _refuse_retired(standing: Row | None, bound: BoundCorpus, identity: str) -> None:
    if standing and standing["retired_at"]:
        raise RetiredModel(
            f"The model {identity} of '{bound.kind}' was retired on {standing['retired_at']:%Y-%m-%d %H:%M} UTC. Set "
            "EMBED_PROTOCOL and EMBED_MODEL back to those of the active one (see 'embed-assets models'), or allow it "
            f"again: embed-assets admit {bound.kind} '{identity}'"
        )


def _model_id(postgres: Postgres, identity: str, dimensions: int) -> int:
    row = postgres.one("corpus.model_of", {"identity": identity})
    if row is None:
        postgres.execute("corpus.add_model", {"identity": identity, "dimensions": dimensions})
        row = postgres.one("corpus.model_of", {"identity": identity})
    assert row is not None
    if row["dimensions"] != dimensions:
        raise ConfigurationError(
            f"The model {identity} was {row['dimensions']} wide and now answers with {dimensions} dimensions. Set "
            "EMBED_MODEL to the name of the new model, or EMBED_URL back to the old one."
        )
    return int(row["id"])


def locked(cursor: Cursor[Row], kind: str) -> Row:
    """The kind's active, previous and target model, read once its exclusive lock is had and nobody changes them."""
    cursor.execute(query("models.lock_kind"), {"kind": kind})
    row = cursor.execute(query("corpus.corpus"), {"kind": kind}).fetchone()
    assert row is not None
    return row


def make_target(cursor: Cursor[Row], ids: dict[str, Any]) -> None:
    """Under the kind's lock. The former target, if search never read it, is retired, and its entries leave."""
    cursor.execute(query("models.set_target"), ids)
    for row in cursor.execute(query("models.retire_unfinished"), ids).fetchall():
        logger.warning("%s: model %s, which was being built, is given up for another", ids["kind"], row["model_id"])
        supersede(cursor, ids | row)


def supersede(cursor: Cursor[Row], ids: dict[str, Any]) -> None:
    """The entries of a retired model leave; backfills that were asked for it alone count as cancelled."""
    cursor.execute(query("backfill.forsake"), ids)
    cursor.execute(query("models.supersede"), ids)
