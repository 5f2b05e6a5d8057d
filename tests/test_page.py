"""The page of ``optimus bench --html``: parsed here, and by its own target seen in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from optimus.cli import main
from optimus.measure import machine, page, report, waterfall
from optimus.measure.figures import Comparison, Row, Work
from optimus.measure.side import STOCK, Task

BUILD = Path(__file__).parents[1] / "build" / "page"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PLOTS = ("Latency", "Throughput", "Memory", "Error")
# Every text of a plot that leaves it, which a reader would see cut off.
CUT_OFF = """() => [...document.querySelectorAll('svg')].flatMap(svg =>
  [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBBox();
    return box.x < 0 || box.x + box.width > svg.viewBox.baseVal.width;
  }).map(text => text.textContent))"""
# The contrast of every text with the page, as WCAG counts it; 4.5 is what it asks of small print.
CONTRAST = """() => {
  const light = colour => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratios = [...document.querySelectorAll('h1, h2, p, figcaption, td, th, text')].map(one => {
    const style = getComputedStyle(one);
    const ink = light(one.tagName === 'text' ? style.fill : style.color);
    return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
  });
  return Math.min(...ratios);
}"""


@pytest.fixture(scope="module")
def comparison():
    """Figures made up: auto is twice as fast, bf16 is refused, odd answers NaN."""
    work = Work(model="m<1>", texts=8, batch=4, tokens=300, places=400, length=64)
    stock = Row(name=STOCK, seconds=(0.2, 0.3, 0.25), error=0.0, threads=2, allocator="glibc")
    stock = dataclasses.replace(stock, peak_bytes=4 * 10**8)
    facts = {"swaps": [f"any.swap.{number}" for number in range(11)]}
    auto = dataclasses.replace(stock, name="auto", seconds=(0.1, 0.11), error=5e-7, facts=facts)
    odd = dataclasses.replace(
        stock, name="odd", error=float("nan"), unverified="its outputs hold NaN or infinity."
    )
    rows = (stock, auto, odd, Row(name="bf16", refused="no native bf16"))
    return Comparison(work, rows, machine.describe())


@pytest.fixture(scope="module")
def fallen(comparison):
    """A swap that gains, one that costs, one that gains."""
    falls = zip((STOCK, "a.first", "b.second", "c.third"), (0.2, 0.12, 0.15, 0.1), strict=True)
    rows = tuple(Row(name=name, seconds=(seconds, 0.3)) for name, seconds in falls)
    return waterfall.Waterfall("auto", dataclasses.replace(comparison, rows=rows))


@pytest.fixture(scope="module")
def benched(tiny_bert, tmp_path_factory):
    """What ``bench`` says of a tiny model as JSON, and the page that it writes."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "data.txt").write_text("the value of the list\nreturn it if it is to be\nthe list\n")
    command = ["bench", str(tiny_bert), "--data", str(folder / "data.txt"), "--runs", "2"]
    command += [
        "--recipe",
        "auto",
        "--recipe",
        "fp8",
        "--html",
        str(folder / "page.html"),
        "--json",
    ]
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("rich.console.Console.print_json", lambda _, text: said.append(text))
        assert main(command) == 0
    return json.loads(said[0]), folder / "page.html"


def plots(made: str) -> dict[str, ET.Element]:
    """Every figure by its caption; what is not well-formed does not parse."""
    figures = ET.fromstring(made).iter("figure")
    return {"".join(one.find("figcaption").itertext()): one for one in figures}


def bars(figure: ET.Element) -> dict[str, str]:
    """What is written beside every bar of a plot, by the bar's name."""
    titles = ("".join(rect.find("title").itertext()) for rect in figure.iter("rect"))
    return dict(title.split(": ", 1) for title in titles)


def widths(figure: ET.Element) -> list[float]:
    """How long the bars are, in pixels."""
    return [float(rect.get("width")) for rect in figure.iter("rect")]


def assert_alone(made: str) -> None:
    """Nothing in it names another file or place, and nothing runs."""
    assert not re.search(r"https?:|//|@import|url\(|<script|\ssrc=|\shref=|\son\w+=", made)


def test_the_page_needs_nothing_else(comparison, fallen):
    """No request leaves it, names are escaped, and every side that ran is in every plot."""
    made = page.html(comparison, fallen)
    assert_alone(made)
    assert "m&lt;1&gt;" in made
    found = plots(made)
    assert [title.split(",")[0] for title in found][:4] == list(PLOTS)
    for title in list(found)[:4]:
        assert list(bars(found[title])) == [STOCK, "auto", "odd"]
    assert "bf16 refused: no native bf16" in made
    assert "nan" not in "".join(rect.get("width") for rect in ET.fromstring(made).iter("rect"))


def test_bars_are_as_long_as_their_figures(comparison):
    """Latency by hand: auto takes half of stock's time, and its error is 5e-7 of eight decades."""
    found = plots(page.html(comparison))
    latency, _, _, error = found.values()
    stock, auto, _ = widths(latency)
    assert auto == pytest.approx(stock / 2, abs=0.1)
    assert bars(latency)["auto"] == "100 ms, 2.00x"
    assert bars(error) == {STOCK: "stock itself", "auto": "5.0e-07", "odd": "nan"}
    assert widths(error)[0] == 0 < widths(error)[1]


def test_the_waterfall_goes_from_stock_to_the_recipe(comparison, fallen):
    """A bar begins where the one before ended; what costs is of another colour than what gains."""
    figure = plots(page.html(comparison, fallen))["Latency of auto, swap by swap"]
    assert bars(figure) == {
        STOCK: "200 ms",
        "a.first": "-80 ms",
        "b.second": "+30 ms",
        "c.third": "-50 ms",
        "auto": "100 ms",
    }
    kinds = [rect.get("class") for rect in figure.iter("rect")]
    assert kinds == ["stock", "mine", "slower", "mine", "mine"]
    edges = [
        (float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in figure.iter("rect")
    ]
    assert edges[0][1] == pytest.approx(edges[1][1], abs=0.2)
    assert edges[1][0] == pytest.approx(edges[2][0], abs=0.2)
    assert edges[2][1] == pytest.approx(edges[3][1], abs=0.2)
    assert edges[3][0] == pytest.approx(edges[4][1], abs=0.2)


def test_swaps_beyond_the_eighth_are_one_bar(comparison):
    """Each side has what the one before has and one more; the last has everything."""
    task = Task(model="m", texts=["a"], batch=1, length=8, recipe="auto")
    sides = waterfall.tasks(task, comparison.rows[1])
    counts = [len(side.swaps or ()) for side in sides.values()]
    assert counts == [0, 1, 2, 3, 4, 5, 6, 7, 11]
    assert (sides[STOCK].recipe, list(sides)[-1]) == (STOCK, "any.swap.7 and 3 more")
    nothing = dataclasses.replace(comparison.rows[1], facts={"swaps": []})
    assert waterfall.tasks(task, nothing) == {}


def test_bench_prints_figures(benched):
    """Stock and auto run and are compared; a recipe that is not built is a row with a reason."""
    stock, auto, fp8 = benched[0]["sides"]
    assert (stock["side"], len(stock["seconds"]), stock["relative_error"]) == (STOCK, 2, 0.0)
    assert auto["relative_error"] < 1e-5
    assert auto["facts"]["claims"] > 0
    assert "not built" in fp8["refused"]


def test_bench_writes_the_figures_of_its_json(benched):
    """Every side, every bar, and the numbers of the JSON; the swaps end at the whole recipe."""
    figures, path = benched
    made = path.read_text(encoding="utf-8")
    assert_alone(made)
    latency, throughput, memory, error, falls = map(bars, plots(made).values())
    for side in figures["sides"][:2]:
        name = side["side"]
        assert latency[name].startswith(f"{side['min_seconds'] * 1e3:,.4g} ms")
        assert throughput[name] == f"{side['tokens_per_second']:,.0f}"
        assert memory[name] == f"{side['peak_bytes'] / 1e6:,.0f} MB"
        assert name == STOCK or error[name] == f"{side['relative_error']:.1e}"
    steps = figures["waterfall"]["steps"]
    assert [step["swap"] for step in steps] == figures["sides"][1]["facts"]["swaps"]
    for step in steps:
        change = step["after_seconds"] - step["before_seconds"]
        assert falls[step["swap"]] == f"{change * 1e3:+,.4g} ms"
    assert falls["auto"] == f"{steps[-1]['after_seconds'] * 1e3:,.4g} ms"
    assert min(figures["waterfall"]["seconds"]["stock"]) == steps[0]["before_seconds"]


@pytest.mark.page
def test_a_browser_shows_it(benched, comparison, fallen):
    """Light, dark and narrow: no word on the console, no request, nothing cut off or too faint."""
    from playwright.sync_api import sync_playwright

    BUILD.mkdir(parents=True, exist_ok=True)
    synthetic = BUILD / "synthetic.html"
    synthetic.write_text(page.html(comparison, fallen), encoding="utf-8")
    installed = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as player:
        # A container has no user namespaces; the pages are our own.
        browser = player.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        for name, path in (("bench", benched[1]), ("synthetic", synthetic)):
            for scheme, width in (("light", 1100), ("dark", 1100), ("light", 420)):
                shot = BUILD / f"{name}-{scheme}-{width}.png"
                assert_shown(browser, path, scheme=scheme, width=width, shot=shot)
        browser.close()


def assert_shown(browser, path: Path, *, scheme: str, width: int, shot: Path) -> None:
    """Open the page, and leave a screenshot behind."""
    view = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    said, asked = [], []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto(path.as_uri())
    view.screenshot(path=shot, full_page=True)
    assert (said, asked) == ([], [path.as_uri()])
    assert view.evaluate(CUT_OFF) == []
    assert view.evaluate(CONTRAST) >= 4.5
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert shot.stat().st_size > 10_000
    view.close()


def test_the_verdict_is_the_headline(comparison):
    """The best is what the sentence names, and who answers NaN is never it."""
    assert comparison.best is comparison.rows[1]
    heading = ET.fromstring(page.html(comparison)).find("body/h1")
    assert heading.text == report.verdict(comparison)
