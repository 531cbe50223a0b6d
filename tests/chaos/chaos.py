"""Faults at random while rows change, then rest, then the facts must equal the source.

    python -m tests.chaos.chaos --kills 50 --seed 1

Drains, a producer, Dagster's sensor and the embedding server are at work; one after the other is killed, told to end,
or stopped beyond its lease, and so is Postgres. Nothing may be lost, stale or mixed afterwards, and a text may be
paid for twice only if it was under way when something died. Prints numbers; exit code 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from embed_assets.fake_server import vector_for
from embed_assets.load import create_jobs_table
from embed_assets.migrate import migrate
from tests.chaos.embedding_process import sendings
from tests.chaos.producer import settle, started
from tests.chaos.surroundings import INTERRUPTED, REQUEST_ITEMS, Program, Surroundings
from tests.chaos.truth import Facts, facts

FAULTS = (
    "kill drain",
    "terminate drain",
    "freeze drain",
    "stop postgres",
    "stop postgres at once",
    "kill postgres",
    "kill embedding",
    "kill run",
)
OPEN_WAVES = "SELECT wave_id FROM embed_assets.claimed_waves WHERE closed_at IS NULL"
RECOVERED = """
SELECT NOT EXISTS (SELECT FROM embed_assets.claimed_waves WHERE wave_id = ANY(%s) AND closed_at IS NULL)
    AND EXISTS (
        SELECT FROM embed_assets.claimed_waves WHERE outcome = 'written' AND closed_at > to_timestamp(%s)
    )"""

LATE = 30
STILL_OPEN = """
SELECT wave_id, run_id, clock_timestamp() - claimed_at, started_at IS NOT NULL, lease_until - clock_timestamp(), texts
FROM embed_assets.claimed_waves WHERE closed_at IS NULL ORDER BY wave_id"""


@dataclass
class Fault:
    """`waves`: open when it befell; it is over when all of them are closed and another has been written since."""

    kind: str
    at: float
    waves: list[int] = field(default_factory=list)
    until: float | None = None
    recovered: float | None = None


@dataclass
class Outcome:
    """What a run found; `failures` says in words what does not hold."""

    seconds: float
    faults: list[Fault]
    transactions: int
    lost_connections: int
    producer_errors: list[str]
    facts: Facts
    at_rest: float | None
    dead: list[str]
    unexplained_dead: list[str]
    waves: Counter[str]
    sent: int
    texts: int
    sent_again: int
    sent_again_without_a_fault: int
    bound: int
    exits: list[int]
    ended: list[str]

    @property
    def failures(self) -> list[str]:
        facts = self.facts
        checks = {
            f"the facts are not the source's: {dict(facts.wrong)} {facts.examples}": facts.wrong,
            f"the queue is not empty: {dict(facts.queue)}, feed {facts.feed}": facts.queue or facts.feed,
            f"{facts.open_waves} waves are open": facts.open_waves,
            f"{facts.plans} rows of plans are left": facts.plans,
            f"{facts.models} models": facts.models != 1,
            f"dead without a reason: {self.unexplained_dead}": self.unexplained_dead,
            f"{self.sent_again} texts were sent again, more than {self.bound}": self.sent_again > self.bound,
            f"{self.sent_again_without_a_fault} texts were sent again though nothing had died meanwhile": (
                self.sent_again_without_a_fault
            ),
            f"errors of producers: {self.producer_errors}": self.producer_errors,
            f"drains told to end ended with {self.exits}": set(self.exits) - {INTERRUPTED},
            f"not recovered from: {[fault.kind for fault in self.faults if fault.recovered is None]}": any(
                fault.recovered is None for fault in self.faults
            ),
        }
        return [text for text, fails in checks.items() if fails]

    def print(self) -> None:
        print(f"{len(self.faults)} faults in {self.seconds:.0f} s; at rest {self.at_rest or float('nan'):.0f} s later")
        for kind in FAULTS:
            mine = [fault for fault in self.faults if fault.kind == kind]
            if mine:
                seconds = [fault.recovered - fault.at for fault in mine if fault.recovered]
                hit = sum(bool(fault.waves) for fault in mine)
                times = f"{statistics.median(seconds):.1f} s median, {max(seconds):.1f} s at most" if seconds else "–"
                print(f"  {kind}: {len(mine)}, {hit} amid open waves; recovered from {len(seconds)}: {times}")
        print(f"waves: {dict(self.waves)}")
        print(
            f"producers: {self.transactions} transactions, {self.lost_connections} lost connections, "
            f"{len(self.producer_errors)} errors"
        )
        print(
            f"texts: sent {self.sent}, needed {self.texts}, again {self.sent_again} (bound {self.bound}), "
            f"of these without a fault between {self.sent_again_without_a_fault}"
        )
        print(f"dead letters: {len(self.dead)}, without a reason {len(self.unexplained_dead)}")
        print(f"ended by themselves: {len(self.ended)} {dict(Counter(self.ended)) if self.ended else ''}")
        print(
            f"facts: {self.facts.rows} rows, {self.facts.chunks} chunks, wrong {dict(self.facts.wrong)}, "
            f"queue {dict(self.facts.queue)}, feed {self.facts.feed}, open waves {self.facts.open_waves}"
        )
        for failure in self.failures:
            print(f"DOES NOT HOLD: {failure}")


class Chaos:
    """One run: `faults` in this order, `pause` (least, most) seconds apart; `patience` for what must come right."""

    def __init__(
        self, around: Surroundings, faults: Sequence[str], seed: int, pause: tuple[float, float], patience: float
    ) -> None:
        self._around, self._kinds, self._pause, self._patience = around, faults, pause, patience
        self._random = random.Random(seed)
        self._started: list[Fault] = []
        self._thawing: list[threading.Thread] = []
        self._over = threading.Event()

    def befall(self) -> list[Fault]:
        """Every fault, then everything up again and recovered from."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        for kind in self._kinds:
            time.sleep(self._random.uniform(*self._pause))
            self._befall(kind)
        for thread in self._thawing:
            thread.join()
        self._around.rest()
        until = time.monotonic() + self._patience
        while any(fault.recovered is None for fault in self._started) and time.monotonic() < until:
            time.sleep(0.2)
        self._over.set()
        watcher.join()
        return self._started

    def _befall(self, kind: str) -> None:
        runs = self._around.runs() if kind == "kill run" else []
        if kind == "kill run" and not runs:
            kind = "kill drain"
        found = self._around.database.ask(OPEN_WAVES)
        fault = Fault(kind, time.time(), [int(str(row[0])) for row in found or []])
        actions: dict[str, Callable[[], None]] = {
            "kill drain": lambda: self._drain().kill(),
            "terminate drain": lambda: self._terminate(self._drain()),
            "freeze drain": lambda: self._freeze(self._drain(), fault),
            "stop postgres": lambda: self._without_postgres(self._around.database.stop),
            "stop postgres at once": lambda: self._without_postgres(self._around.database.stop_at_once),
            "kill postgres": lambda: self._without_postgres(self._around.database.kill),
            "kill embedding": self._without_embedding,
            "kill run": lambda: subprocess.run(["kill", "-9", str(runs[0])], check=False) and None,
        }
        actions[kind]()
        if kind != "freeze drain":
            fault.until = time.time()
        self._started.append(fault)
        print(f"{len(self._started)}: {kind} at {time.strftime('%H:%M:%S', time.localtime(fault.at))}", flush=True)

    def _drain(self) -> Program:
        """A drain that lives; waited for, since one that was killed is only just starting again."""
        while not (able := [drain for drain in self._around.drains if drain.alive and not drain.frozen]):
            time.sleep(0.05)
        return self._random.choice(able)

    def _terminate(self, drain: Program) -> None:
        try:
            drain.terminate()
        except subprocess.TimeoutExpired:
            self._around.ended.append(f"{drain.name} did not end within 30 s of being told to")
            drain.kill()

    def _freeze(self, drain: Program, fault: Fault) -> None:
        """Stopped beyond its lease, then going on as if nothing had been."""
        drain.frozen = True
        drain.signal(signal.SIGSTOP)

        def thaw() -> None:
            time.sleep(self._around.lease + self._random.uniform(1, 5))
            drain.signal(signal.SIGCONT)
            fault.until = time.time()
            drain.frozen = False

        self._thawing.append(threading.Thread(target=thaw, daemon=True))
        self._thawing[-1].start()

    def _without_postgres(self, end: Callable[[], None]) -> None:
        end()
        time.sleep(self._random.uniform(0, 2))
        self._around.database.up()

    def _without_embedding(self) -> None:
        self._around.embedding.kill()
        time.sleep(self._random.uniform(0, 3))
        self._around.embedding.start()

    def _watch(self) -> None:
        """Notice when a fault is recovered from, and say who kept a late one waiting."""
        said: set[int] = set()
        while not self._over.wait(0.25):
            for number, fault in enumerate(self._started, 1):
                if fault.recovered is None and (row := self._around.database.ask(RECOVERED, fault.waves, fault.at)):
                    if row[0][0]:
                        fault.recovered = time.time()
                    elif time.time() - fault.at > LATE and number not in said:
                        said.add(number)
                        print(f"{number} is not over after {LATE} s: {self._around.database.ask(STILL_OPEN)}")


def run(
    kinds: Sequence[str],
    *,
    seed: int,
    pause: tuple[float, float] = (2.0, 5.0),
    drains: int = 3,
    rows: int = 150,
    dagster: bool = False,
    keep: bool = False,
    patience: float = 180.0,
) -> Outcome:
    """Start everything, let the faults befall it, wait for rest, and judge."""
    folder = Path(tempfile.mkdtemp(prefix="embed_assets_chaos_"))
    folder.chmod(0o755)
    around = Surroundings(folder, drains=drains, batch=12, lease=10, seconds_per_text=0.05)
    try:
        migrate(around.database.url())
        with psycopg.connect(around.database.url(), autocommit=True) as db:
            create_jobs_table(db)
        producers = started("ab", around.database.url, seed, rows=rows, pause=0.3)
        around.start(dagster=dagster)
        _await(lambda: bool(around.database.ask("SELECT 1 FROM pg_tables WHERE tablename = 'semantic_stamps'")))
        _await(lambda: (around.database.ask("SELECT count(*) FROM embed_assets.claimed_waves") or [(0,)])[0][0] != 0)
        begun = time.time()
        faults = Chaos(around, kinds, seed, pause, patience).befall()
        seconds = time.time() - begun
        settle(producers)
        dead, at_rest = _rest(around, patience)
        exits = around.end_drains()
        if around.dev.alive:
            around.dev.terminate(60)
        sent = sendings(around.record)
        return Outcome(
            seconds=seconds,
            faults=faults,
            transactions=sum(producer.transactions for producer in producers),
            lost_connections=sum(producer.lost_connections for producer in producers),
            producer_errors=[error for producer in producers for error in producer.errors],
            facts=facts(around.database.url(), vector_for),
            at_rest=at_rest,
            dead=[str(entry) for entry in dead],
            unexplained_dead=[
                str(entry)
                for entry in dead
                if entry["error_code"] != "LEASE_ATTEMPTS_EXHAUSTED" or entry["crashes"] < 3
            ],
            waves=_waves(around),
            sent=sum(map(len, sent.values())),
            texts=len(sent),
            sent_again=sum(len(times) - 1 for times in sent.values()),
            sent_again_without_a_fault=sum(_unexplained(times, faults) for times in sent.values()),
            bound=REQUEST_ITEMS * len(faults),
            exits=exits,
            ended=around.ended,
        )
    finally:
        around.close()
        if keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _unexplained(times: list[float], faults: list[Fault]) -> int:
    """How many sendings of a text followed another with no fault between."""
    pairs = zip(sorted(times), sorted(times)[1:], strict=False)
    return sum(not any(a - 1 <= (fault.until or b) and fault.at <= b for fault in faults) for a, b in pairs)


def _rest(around: Surroundings, patience: float) -> tuple[list[dict[str, object]], float | None]:
    """Wait until the facts equal the source; dead letters are given to the operator's retry, and reported."""
    begun = time.monotonic()
    dead: list[dict[str, object]] = []
    while time.monotonic() - begun < patience:
        found = facts(around.database.url(), vector_for)
        if found.at_rest:
            return dead, time.monotonic() - begun
        if found.dead and set(found.queue) == {"dead"}:
            dead += found.dead
            subprocess.run(
                [sys.executable, "-m", "embed_assets", "retry", "jobs", "--yes"],
                env=around.environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        time.sleep(1)
    return dead, None


def _waves(around: Surroundings) -> Counter[str]:
    rows = around.database.ask(
        "SELECT CASE WHEN run_id LIKE 'cli-%%' THEN 'drain' ELSE 'sensor' END || ' ' || coalesce(outcome, 'open'), "
        "count(*) FROM embed_assets.claimed_waves WHERE %s GROUP BY 1 ORDER BY 1",
        True,
    )
    return Counter({str(name): int(str(number)) for name, number in rows or []})


def _await(ready: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "nothing begins"
        time.sleep(0.1)


def faults_at_random(number: int, seed: int, *, dagster: bool) -> list[str]:
    """Every kind as often as every other, in any order."""
    chosen = random.Random(seed)
    kinds = [kind for kind in FAULTS if dagster or kind != "kill run"]
    rounds = [chosen.sample(kinds, len(kinds)) for _ in range(-(-number // len(kinds)))]
    return [kind for one in rounds for kind in one][:number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--no-dagster", action="store_true", help="drains alone, without the sensor's runs")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    dagster = not options.no_dagster
    kinds = faults_at_random(options.kills, options.seed, dagster=dagster)
    outcome = run(kinds, seed=options.seed, dagster=dagster, keep=options.keep)
    outcome.print()
    sys.exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    main()
