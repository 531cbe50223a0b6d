"""One drain of the built-in jobs as a process of its own, for tests to kill.

    python drain_process.py URL [--stand-at REQUEST] [--poison TEXT]

What its embedder is asked stands in `public.asked`, as it would in a server's log. Before it answers request REQUEST
it waits for advisory lock 4712; at a text that holds TEXT it kills its process, as running out of memory does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import psycopg

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fakes import HashEmbedder  # noqa: E402  # tests are not installed

from embed_assets import pipeline  # noqa: E402
from embed_assets.corpora.jobs import jobs  # noqa: E402
from embed_assets.resources.assembly import assemble, maintained  # noqa: E402
from embed_assets.resources.declaration import bind  # noqa: E402
from embed_assets.resources.postgres import Postgres  # noqa: E402
from embed_assets.resources.tables import make_tables  # noqa: E402
from embed_assets.settings import Settings  # noqa: E402
from embed_assets.stop import Stop  # noqa: E402

STAND = 4712


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--stand-at", type=int, default=0)
    parser.add_argument("--poison")
    options = parser.parse_args()
    log = psycopg.connect(options.url, autocommit=True)
    embedder = HashEmbedder(request_items=2)

    def before(texts: Sequence[str]) -> None:
        log.execute("INSERT INTO public.asked (text) SELECT unnest(%s::text[])", (list(texts),))
        if embedder.requests == options.stand_at:
            log.execute("SELECT pg_advisory_lock(%s)", (STAND,))
        if options.poison and any(options.poison in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)

    embedder.before = before
    drain(options.url, embedder)


def drain(url: str, embedder: HashEmbedder) -> None:
    postgres = Postgres(url)
    bound = bind(postgres, jobs)
    make_tables(postgres, bound)
    kind = assemble(
        Settings(batch_size=6), postgres, bound, [maintained(Settings(batch_size=6), postgres, bound, jobs, embedder)]
    )
    pipeline.drain(kind.ports, f"process-{uuid.uuid4()}", limits=kind.limits, stop=Stop())
    kind.close()


if __name__ == "__main__":
    main()
