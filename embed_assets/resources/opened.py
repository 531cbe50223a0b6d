"""What one process has opened: kinds for its runs, watches for its sensors. Shared by every resource of a project.

Opening a kind migrates, checks its declaration and assembles its parts, so it happens once per run, and once per
kind for all ticks of a sensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from embed_assets.corpus import Registry, TableCorpus
from embed_assets.embedding import Embedder
from embed_assets.resources.assembly import Kind, open_kind
from embed_assets.resources.run import DrainRun
from embed_assets.resources.watch import Watch
from embed_assets.settings import Settings

logger = logging.getLogger(__name__)


class OpenKinds:
    """Thread-safe. `embedder` stands in for the one that the settings name."""

    def __init__(self, settings: Settings, corpora: Sequence[TableCorpus], embedder: Embedder | None = None) -> None:
        self.settings = settings
        self.registry = Registry(corpora)
        self._embedder = embedder
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], DrainRun] = {}
        self._watches: dict[str, Watch] = {}

    def _open(self, kind: str) -> Kind:
        return open_kind(self.settings, self.registry[kind], embedder=self._embedder)

    def run(self, run_id: str, kind: str) -> DrainRun:
        """The run's hold on a kind, opened when first asked for. Raises ConfigurationError."""
        with self._lock:
            if (run_id, kind) not in self._runs:
                self._runs[run_id, kind] = DrainRun(self._open(kind), run_id)
            return self._runs[run_id, kind]

    def end(self, run_id: str) -> None:
        """Give back every wave the run still holds, then its connections. Safe to repeat."""
        with self._lock:
            mine = [self._runs.pop(key) for key in list(self._runs) if key[0] == run_id]
        for run in mine:
            try:
                run.release()
            except Exception:  # the lease will lapse; the connections must be closed all the same
                logger.exception("open waves of the run could not be released")
            finally:
                run.kind.close()

    def watch(self, kind: str) -> Watch:
        """A kind's watch, kept between ticks. Raises ConfigurationError."""
        with self._lock:
            if kind not in self._watches:
                self._watches[kind] = Watch(self._open(kind))
            return self._watches[kind]

    def forget(self, kind: str) -> None:
        """Open the watch anew next time: after an error its database may be another one."""
        with self._lock:
            watch = self._watches.pop(kind, None)
        if watch:
            with suppress(Exception):
                watch.close()
