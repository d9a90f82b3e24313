"""A browser shows report.html without an error, with every picture, and on paper."""

import shutil

import pytest

from tests.trainer.test_run_report import HOSTILE, Draws, fit_alone, pytestmark

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; bash tests/run_browser installs it"
)
pytestmark = [*pytestmark, pytest.mark.slow]


@pytest.fixture
def browser():
    with playwright.sync_playwright() as tools:
        path = shutil.which("chromium")  # the distribution's, if there is one
        opened = tools.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_no_error_and_no_missing_picture(browser, tmp_path):
    report, _ = fit_alone(tmp_path, Draws(tmp_path), config=f"name: {HOSTILE}")
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.path.as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [report.path.as_uri()]
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert widths == [4]
    drawn = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.clientHeight)")
    assert drawn
    assert min(drawn) > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    assert "SimpleCNNModule: report of a run" in page.inner_text("h1")
    assert HOSTILE in page.inner_text("pre")
    assert len(page.pdf()) > 1000
    page.screenshot(path=tmp_path / "report.png", full_page=True)


def test_it_fits_a_telephone(browser, tmp_path):
    report, _ = fit_alone(tmp_path, Draws(tmp_path))
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(report.path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
