"""Dagster's UI through a real browser: what a person does there, in their words.

What does not belong here: what must come of it (`test_ui.py`), the project that runs (`tests/e2e/running.py`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "Debian's package chromium is not installed"
LOCATION = "embed_assets.definitions"
SIZE = {"width": 1120, "height": 640}  # small pictures
PATIENCE = 30_000  # ms
# Where each node of the graph stands, and the first line in it.
NODES = """() => [...document.querySelectorAll("svg foreignObject")].map(
  (node) => [node.getBoundingClientRect().x, (node.firstElementChild?.innerText ?? "").split("\\n")[0]])"""


class Ui:
    """One page of a browser. `images`: where `picture` writes; None: nowhere."""

    def __init__(self, page: Page, address: str, images: Path | None) -> None:
        self.page, self._address, self._images = page, address, images

    def go(self, path: str) -> None:
        self.page.goto(self._address + path)

    def picture(self, name: str) -> None:
        if self._images:
            self.page.wait_for_timeout(700)  # dialogs fade in, graphs slide to their place
            self.page.screenshot(path=self._images / f"{name}.png")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name)

    def assets_from_left_to_right(self, group: str) -> list[str]:
        """The names that the graph of a group shows, in the order in which they stand there."""
        self.go(f"/locations/{LOCATION}/asset-groups/{group}/lineage")
        expect(self.page.locator("svg foreignObject").filter(has_text="semantic_outbox").first).to_be_visible()
        self.page.wait_for_timeout(700)  # the graph slides to its place
        nodes = self.page.evaluate(NODES)
        return [name for _, name in sorted(nodes) if name]

    def materialize(self, job: str) -> str:
        """All assets of a job; returns the run's id, and stands on its page."""
        self.go(f"/locations/{LOCATION}/jobs/{job}")
        self.button("Materialize all").click()
        self.page.get_by_role("link", name="View", exact=True).click()
        return self._run_on_this_page()

    def launch(self, job: str, **changes: str) -> str:
        """A job from its Launchpad with some of the prefilled lines changed; stands on the run's page then."""
        self.go(f"/locations/{LOCATION}/jobs/{job}/playground")
        config = self._config()
        for name, value in changes.items():
            config, number = re.subn(rf"(\b{name}: ).*", rf"\g<1>{value}", config)
            assert number == 1, f"{name} does not stand in the Launchpad: {config}"
        self._set_config(config)
        self.picture(f"launchpad-{job}")
        self.button("Launch Run").click()
        return self._run_on_this_page()

    def backfill(self, asset: str, buckets: Sequence[str], config: str) -> None:
        """Partitions from the asset's dialog, with a config."""
        self.go(f"/assets/{asset}")
        self.button("Materialize…").click()
        self.page.get_by_text("Select a partition or create one").click()
        for bucket in buckets:
            self.page.get_by_placeholder("Filter partitions").fill(bucket)
            row = self.page.locator("div:has(> label > input[type=checkbox])").filter(has_text=bucket)
            row.locator("label").last.click()
        self.page.get_by_text("Launch runs to materialize").click()
        self.page.get_by_text("Config", exact=True).last.click()
        self.button("Add config").click()
        self.page.locator(".CodeMirror").wait_for()
        self._set_config(config)
        self.button("Save config").click()
        expect(self.page.get_by_text(f"{len(buckets)} partitions", exact=True)).to_be_visible()
        self.picture("backfill")
        self.button("Launch backfill").click()
        expect(self.button("Launch backfill")).to_have_count(0)

    def expect_partitions(self, asset: str, state: str, number: int) -> None:
        """The asset's page counts so many partitions as `Materialized`, `Missing` or `Failed`."""
        self.go(f"/assets/{asset}?view=partitions")
        expect(self.page.get_by_text(f"{state} ({number})", exact=True)).to_be_visible()

    def terminate(self, run: str) -> None:
        """From the run's page; returns once the dialog says that it is done."""
        self.go(f"/runs/{run}")
        self.button("Terminate").click()
        dialog = self.page.get_by_role("dialog")
        self.picture("terminate")
        dialog.get_by_role("button", name=re.compile("^Terminate|^Yes")).click()

    def expect_status(self, status: str, seconds: float = 60) -> None:
        """The run on this page comes to that status."""
        tag = self.page.get_by_text(status, exact=True).first
        expect(tag).to_be_visible(timeout=seconds * 1000)

    def _config(self) -> str:
        self.page.locator(".CodeMirror").wait_for()
        read = "() => document.querySelector('.CodeMirror').CodeMirror.getValue()"
        self.page.wait_for_function(f"({read})().trim() !== ''")
        return str(self.page.evaluate(read))

    def _set_config(self, config: str) -> None:
        self.page.evaluate("text => document.querySelector('.CodeMirror').CodeMirror.setValue(text)", config)
        expect(self.page.get_by_text("No errors").first).to_be_visible()

    def _run_on_this_page(self) -> str:
        self.page.wait_for_url(re.compile(r"/runs/[0-9a-f-]{36}"))
        return self.page.url.rsplit("/", 1)[-1].partition("?")[0]


@contextmanager
def opened(port: int, images: Path | None = None) -> Iterator[Ui]:
    """A browser on the UI at that port, without Dagster's greeting."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        page.add_init_script("localStorage.setItem('communityNux', '1')")
        try:
            yield Ui(page, f"http://127.0.0.1:{port}", images)
        except BaseException:
            if images:
                page.screenshot(path=images / "failed.png")
            raise
        finally:
            browser.close()
