"""Pages in a real browser, Chromium without a window: what they draw, hover, buttons, CSV, a phone, paper."""

import json
import shutil
import threading

import pytest

from shardline.cli.main import main
from shardline.show.serve import make_server
from tests.unit.show.made_run import STEPS, make_run, metrics_row, write_lines
from tests.unit.show.test_explain import words_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
program = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"),
]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser")
    with api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def show(browser):
    """Open an address; every message of the console and every error fails the test at its end."""
    opened, troubles = [], []

    def function(address, size=DESKTOP, scheme="light"):
        page = browser.new_page(viewport=size, color_scheme=scheme)
        opened.append(page)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(str(address))
        page.wait_for_selector("figure .plot *")
        page.wait_for_timeout(200)
        return page

    yield function
    for page in opened:
        page.close()
    assert not troubles


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of a full run, of two runs, of a run with curves alone, and of a plan."""
    place = tmp_path_factory.mktemp("pages")
    full, other = make_run(place / "full"), make_run(place / "other", lr=2e-3)
    write_lines(place / "bare" / "metrics.jsonl", [{"step": step, "loss": 5.0 / step} for step in (1, 2, 3)])
    for name, runs in {"full": [full], "two": [full, other], "bare": [place / "bare"]}.items():
        assert main(["report", *map(str, runs), "--out", str(place / f"{name}.html")]) == 0
    assert main(["explain", *words_of(moe=True, pp=2, cp=2, tp=2, ep=4), "--html", "--out", f"{place}/plan.html"]) == 0
    return {name: f"file://{place / name}.html" for name in ("full", "two", "bare", "plan")}


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["full", "two", "bare", "plan"])
def test_pages_draw_all_and_fit(show, pages, name, size, scheme):
    page = show(pages[name], size, scheme)
    assert overflow(page) <= 0
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    empty = page.evaluate("[...document.querySelectorAll('figure .plot')].filter((one) => !one.children.length).length")
    assert empty == 0
    assert page.locator("figure").count() >= (1 if name == "bare" else 7)


def test_hover_and_arrow_keys_show_numbers(show, pages):
    page = show(pages["full"])
    chart = page.locator("#card-loss .u-over")
    chart.hover(position={"x": 300, "y": 60})
    page.wait_for_selector("#tip:not([hidden])")
    assert "training" in page.inner_text("#tip")
    page.mouse.move(5, 5)
    page.focus("#card-loss .plot")
    page.keyboard.press("End")
    assert f"step {STEPS}" in page.inner_text("#tip")
    assert "3.0000" in page.inner_text("#tip")
    page.locator("#card-pipeline rect[data-mark]").first.hover()
    assert "rank 0, forward" in page.inner_text("#tip")
    page.locator("#card-mesh rect[data-mark]").first.hover()
    assert "layers 0-1; 1,000 parameters" in page.inner_text("#tip")


def test_every_picture_has_a_table_and_a_csv_file(show, pages, tmp_path):
    page = show(pages["full"])
    names = page.evaluate("[...document.querySelectorAll('figure.card')].map((one) => one.id)")
    assert {"card-loss", "card-step_parts", "card-pipeline", "card-mesh", "card-expert_load", "card-events"} <= set(
        names
    )
    for name in names:
        card = page.locator(f"#{name}")
        card.get_by_role("button", name="Table", exact=True).click()
        rows = card.locator("tbody tr").count()
        assert rows > 0
        page.wait_for_timeout(150)  # Chromium drops the eleventh download of a second or so
        with page.expect_download() as saved:
            card.get_by_role("button", name="CSV").click()
        lines = saved.value.path().read_text().splitlines()
        assert len(lines) == rows + 1
    loss = page.locator("#card-loss tbody tr").last.inner_text().split()
    assert loss == ["12", "768", "3.0000"]


def test_switches_change_the_charts(show, pages):
    page = show(pages["full"])

    def ticks():
        return page.evaluate("[...document.querySelectorAll('#card-loss canvas')].map((one) => one.toDataURL()).join()")

    seen = [ticks()]
    for press in (
        lambda: page.locator("#card-loss").get_by_role("button", name="Log").click(),
        lambda: page.get_by_role("button", name="Tokens", exact=True).click(),
        lambda: page.locator("#card-loss").get_by_role("button", name="validation").click(),
        lambda: page.locator("#card-loss input").fill("0.9"),
        lambda: page.get_by_role("button", name="Dark").click(),
    ):
        press()
        page.wait_for_timeout(100)
        seen.append(ticks())
    assert len(set(seen)) == len(seen)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_two_runs_show_what_differs(show, pages):
    page = show(pages["two"])
    assert page.locator("#card-loss .legend button").all_inner_texts()[:2] == ["full", "other"]
    page.get_by_role("button", name="Different").click()
    assert page.locator("#config tbody tr").all_inner_texts()[0].split() == ["optimizer.lr", "0.001", "0.002", "0.0008"]
    page.locator("#picker").get_by_role("button", name="other").click()
    assert page.locator("#picker [aria-pressed=true]").inner_text() == "other"


def test_a_bare_run_says_what_is_missing(show, pages):
    text = show(pages["bare"]).inner_text("#missing")
    assert "--validation.enable" in text
    assert "telemetry-0.jsonl" in text


def test_paper_is_light_and_has_no_buttons(show, pages):
    page = show(pages["full"], scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_selector('html[data-theme="light"]', state="attached")
    assert not page.locator("#card-loss .tools").is_visible()
    page.set_viewport_size({"width": 700, "height": 900})
    assert overflow(page) <= 0
    for picture in ("#card-pipeline svg", "#card-step_parts canvas"):  # a print does not draw them again
        page.locator(picture).evaluate("(one) => { one.closest('.plot').style.width = '200px'; }")
        assert page.locator(picture).bounding_box()["width"] <= 200
    assert page.pdf(format="A4")[:4] == b"%PDF"


def test_a_watched_page_draws_new_steps_by_itself(show, tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with make_server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = show(f"http://127.0.0.1:{server.server_address[1]}/")
            page.locator("#card-loss").get_by_role("button", name="Table", exact=True).click()
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics_row(STEPS + 1, loss=1.2345)) + "\n")
            page.locator(".tile b", has_text="1.2345").wait_for(timeout=20_000)
            assert page.locator("#card-loss tbody tr").last.inner_text().split()[0] == str(STEPS + 1)
            page.close()
        finally:
            server.shutdown()
            thread.join()


def test_a_plan_can_be_inspected(show, pages):
    page = show(pages["plan"])
    page.locator("#card-shards rect[data-mark]").first.hover()
    assert "tok_embeddings on rank 0" in page.inner_text("#tip")
    page.locator("#card-schedule rect[data-mark]").first.hover()
    assert "stage 0, micro-batch 0" in page.inner_text("#tip")
    assert page.locator("ol.life li").count() == 12
