"""The report: complete, escaped, and alive in a real browser."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wball
from problems import halves
from references import reference_distance
from wball.evaluation import Evaluation, evaluate
from wball.report import write_report
from wball.report.classes import by_class
from wball.report.pictures import change_uri, image_uri
from wball.report.ranking import latex_table, rank, ranking_csv
from wball.report.transport import plan_moves

pytest.importorskip("jinja2")

NASTY = "</script><script>alert(1)</script>"
RADII = [0.1, 0.2, 0.4]
BALL = wball.WassersteinBall(0.4)


def problem(channels: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(14, channels, 6, 6, generator=generator).square() * 0.8
    model = halves(channels=channels)
    y = model(x).argmax(1)
    y[0] = 1 - y[0]
    return model, x, y


def run(name: str, channels: int = 1, **changes: Any) -> Evaluation:
    model, x, y = problem(channels)
    command = f"wball evaluate '{name}'"
    names = wball.Names(name, classes=("left & <i>", "right"), command=command)
    attack = wball.DualAveraging(BALL, steps=6)
    result = evaluate(model, x, y, BALL, RADII, attack, name=names, **changes)
    return wball.explore(result, model, x, y, ball=BALL)


@pytest.fixture(scope="module")
def evaluations() -> list[Evaluation]:
    return [run("first", certify="crown"), run(NASTY, seed=1)]


@pytest.fixture(scope="module")
def page(evaluations: list[Evaluation], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(evaluations, folder / "new" / "report.html")


def shown(folder: Path, first: Evaluation, *others: Evaluation) -> str:
    """The report as text."""
    return write_report([first, *others], folder / "r.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Collects what a browser would load and the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.unlabelled: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.links += [v for k, v in found.items() if k in ("src", "href") and v]
        self.ids += [v for k, v in found.items() if k == "id" and v]
        if tag == "img" and "alt" not in found:
            self.unlabelled.append(str(found))


def test_one_complete_file(page: Path, evaluations: list[Evaluation]) -> None:
    text = page.read_text(encoding="utf-8")
    parsed = Page()
    parsed.feed(text)
    assert all(link.startswith(("data:", "#")) for link in parsed.links)
    assert not parsed.unlabelled and len(set(parsed.ids)) == len(parsed.ids)
    assert text.count("<h1>") == 1 and 'lang="en"' in text
    assert page.stat().st_size < 15e6
    for e in evaluations:
        for point in e.curve():
            assert f"{100 * point.accuracy:.1f} %" in text


def test_says_how_distances_were_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("wball.evaluation.batches"), "SAMPLE_LEAST", 1)
    result = run("sampled")
    audit = result.audit_summary()
    assert audit["proved_by_plan"] > 0 and audit["both"] > 0
    text = " ".join(shown(tmp_path, result).split())
    assert f"bounded by plan: {audit['valid']}, by exact transport alone: 0" in text
    assert f"Sampled exact check: {audit['both']} of the plans, disagreements: 0" in text
    assert text.count("distance ≤") == audit["proved_by_plan"]
    every = shown(tmp_path, run("every", exact="all"))
    assert "distance ≤" not in every and "Sampled exact check" not in every
    doubtful = shown(tmp_path, replace(result, disagreements=(3, 5)))
    assert "<strong>Disagreement:</strong> the plans of images 3, 5" in doubtful


def test_gallery_has_what_happened_to_each_image(page: Path, evaluations: list[Evaluation]) -> None:
    text = page.read_text(encoding="utf-8")
    for outcome in ("broken", "survived", "wrong"):
        shown = len(re.findall(rf'data-outcome="{outcome}"', text))
        expected = 0
        for e in evaluations:
            wrong = e.images["label"] != e.images["predicted"]
            found = e.images["read_as"] >= 0
            expected += int(
                {"broken": found, "survived": ~wrong & ~found, "wrong": wrong}[outcome].sum()
            )
        assert shown == expected


def test_the_page_opens_with_a_ranking(page: Path, evaluations: list[Evaluation]) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.index('id="ranking"') < text.index('id="curve"') < text.index('id="explorer"')
    evaluations = [replace(e, warnings=()) for e in evaluations]
    ranking = rank(evaluations, ["first", "second"])
    assert ranking.same_data and ranking.reference == 0.2 and ranking.radii == (0.1, 0.2, 0.4)
    accuracies = [row.cells[1].accuracy for row in ranking.rows if row.cells[1] is not None]
    assert accuracies == sorted(accuracies, reverse=True) and [
        row.place for row in ranking.rows
    ] == [1, 2]
    doubtful = replace(
        evaluations[ranking.rows[0].index], warnings=("Randomness: two calls differ",)
    )
    others = [doubtful, evaluations[ranking.rows[1].index]]
    assert [row.place for row in rank(others, ["doubtful", "sound"]).rows] == [1, None]
    assert rank(others, ["doubtful", "sound"]).rows[0].name == "sound"


def test_different_data_are_marked(evaluations: list[Evaluation], tmp_path: Path) -> None:
    model, x, y = problem()
    other = evaluate(
        model, x[:9], y[:9], BALL, RADII[:2], wball.DualAveraging(BALL, steps=2), name="other"
    )
    text = shown(tmp_path, evaluations[0], other)
    assert "different images, so their accuracies are not directly comparable" in text
    assert "different images" not in shown(tmp_path, evaluations[0])


def test_intervals_hold_the_accuracy(evaluations: list[Evaluation]) -> None:
    for part in (0.0, 0.5, 1.0):
        low, high = evaluations[0].interval(part)
        assert 0 <= low <= part <= high <= 1 and high - low > 0.2
    assert evaluations[0].interval(0.5) == pytest.approx(
        (0.2304, 0.7696), abs=1e-4
    )  # Clopper-Pearson, 7 of 14


def test_accuracy_by_class_and_confusion(evaluations: list[Evaluation]) -> None:
    e = evaluations[0]
    found = by_class(e, 0.4)
    images = [row.images for row in found.rows]
    assert sum(images) == len(e) == sum(map(sum, found.matrix))
    weighted = sum(row.robust * row.images for row in found.rows) / len(e)
    assert (
        weighted
        == pytest.approx(e.accuracy_at(0.4))
        == pytest.approx(sum(found.matrix[k][k] for k in (0, 1)) / len(e))
    )
    assert {row.confused for row in found.rows} <= {"left & <i>", "right", None}


def test_results_as_csv_and_latex(evaluations: list[Evaluation], tmp_path: Path) -> None:
    import csv

    text = ranking_csv(evaluations, ["=SUM(A1)", "b"])
    lines = list(csv.DictReader(text.splitlines()))
    assert len(lines) == 2 * (1 + len(RADII)) and lines[0]["model"] == "'=SUM(A1)"
    assert float(lines[1]["accuracy"]) == pytest.approx(evaluations[0].accuracy_at(0.1), abs=1e-5)
    assert lines[0]["certified"] != "" and lines[-1]["certified"] == ""
    table = write_report(evaluations, tmp_path / "t.tex").read_text().splitlines()
    assert table[0] == r"\begin{tabular}{l" + "r" * (1 + len(RADII)) + "}" and len(table) == 8
    assert table[4].startswith(f"first & {100 * evaluations[0].clean_accuracy:.1f} & ")


def test_latex_takes_every_name_literally(evaluations: list[Evaluation]) -> None:
    """A name must not run TeX's commands, open files, end the cell or become an argument."""

    def cell(name: str) -> str:
        settings = evaluations[0].settings
        model = {**settings["model"], "name": name}
        renamed = replace(evaluations[0], settings={**settings, "model": model})
        return latex_table([renamed]).splitlines()[4].split(" & ")[0]

    commands = {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", "|": r"\textbar{}",
    }  # fmt: skip
    for char in map(chr, range(32, 127)):
        escaped = commands.get(char, f"\\{char}" if char in "_&%#${}" else char)
        escaped = f"{{{char}}}" if char in "[]*" else escaped
        assert cell(f"a{char}b") == f"a{escaped}b"
    attack = cell(r"\input{/etc/passwd}\immediate\write18{id} % & \\[9cm]")
    assert attack == (
        r"\textbackslash{}input\{/etc/passwd\}\textbackslash{}immediate\textbackslash{}write18\{id\} "
        r"\% \& \textbackslash{}\textbackslash{}{[}9cm{]}"
    )
    assert cell("a\x1b") == r"a\textbackslash{}x1b"  # no terminal escapes in a log of TeX


def test_refusals(evaluations: list[Evaluation], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        write_report([], tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"\.html"):
        write_report(evaluations, tmp_path / "a.pdf")
    model, x, y = problem()
    ball = wball.LinfBall(0.1)
    other = evaluate(model, x, y, ball, attack=wball.PGD(ball, steps=2))
    with pytest.raises(ValueError, match="different units"):
        write_report([evaluations[0], other], tmp_path / "a.html")
    text = write_report([other], tmp_path / "b.html").read_text(encoding="utf-8")
    # no mass moves in a ball of pixels, and the report does not say so
    assert (
        "<h1>Adversarial robustness:" in text
        and "Wasserstein" not in text.split("<footer")[0].split("<main")[1]
    )
    assert "optimal transport plan;" not in text


def test_histograms_have_no_gallery(tmp_path: Path) -> None:
    places = torch.arange(4.0)
    ball = wball.WassersteinBall(0.1, wball.DenseCost((places[:, None] - places).abs()))
    result = evaluate(nn.Linear(4, 2), torch.rand(1, 4), torch.zeros(1).long(), ball, attack="fast")
    text = shown(tmp_path, result)
    assert (
        'id="filters"' not in text
        and "There are no pictures to show" in text
        and "of 1 image\n" in text
    )


def test_moves_are_a_cheapest_plan() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(1, 5, 6, generator=generator, dtype=torch.float64)
    z = BALL.at(0.3).sample(x[None], generator)[0]
    description = {"cost": "grid", "window": 5, "p": 1.0}
    moves = plan_moves(description, x, z)
    assert moves is not None
    cost = sum(m * math.hypot(r1 - r0, c1 - c0) for r0, c0, r1, c1, m in moves.arrows)
    exact = reference_distance(BALL, x[None], z[None]) * float(x.sum())
    assert cost == pytest.approx(exact, rel=0.02)  # arrows are rounded and the smallest left out
    change = torch.zeros(5, 6, dtype=torch.float64)
    for r0, c0, r1, c1, m in moves.arrows:
        change[int(r0), int(c0)] -= m
        change[int(r1), int(c1)] += m
    torch.testing.assert_close(change, (z - x)[0], atol=5e-3, rtol=0)
    assert plan_moves(description, x, x).arrows == []  # type: ignore[union-attr]
    assert plan_moves({"cost": "matrix"}, x, x) is None


def test_pictures_show_pixels_and_signs() -> None:
    import base64
    import io

    image = pytest.importorskip("PIL.Image")

    def pixels(uri: str) -> Any:
        return np.asarray(image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))

    x = torch.tensor([[[0.0, 1.0], [0.5, 0.2]]])
    assert pixels(image_uri(x)).tolist() == [[0, 255], [128, 51]]
    shown = pixels(change_uri(torch.tensor([[[0.0, 0.1], [-0.2, -5.0]]]), 0.2))
    assert shown[..., 3].tolist() == [[0, 180], [255, 255]]
    assert shown[0, 1, 0] > shown[0, 1, 2] and shown[1, 0, 2] > shown[1, 0, 0]


# In a browser
# --------------------------------------------------------------------------------------------------

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",  # a page that is still scrolling moves away from clicks
    "--window-size=1200,1000",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    pytest.importorskip("selenium", reason="needs selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = binary
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        window = webdriver.Chrome(service=Service(driver), options=options)
        window.set_page_load_timeout(120)
        yield window
        window.quit()


def wait(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.browser
def test_in_a_browser(
    browser: Any, page: Path, evaluations: list[Evaluation], tmp_path: Path
) -> None:
    browser.get(page.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "true")

    def find(selector: str) -> Any:
        return browser.find_element("css selector", selector)

    # the chart: as many lines as there are curves, and exact values on hover
    assert len(browser.find_elements("css selector", "#chart .curve")) == 3
    assert len(browser.find_elements("css selector", "#bands .band")) == 3
    from selenium.webdriver import ActionChains

    plot = find("#chart svg")
    ActionChains(browser).move_to_element_with_offset(
        plot, -plot.size["width"] // 2 + 50, 0
    ).perform()
    wait(lambda: "radius 0\n" in find("#chart .tip").text)
    assert f"first: {100 * evaluations[0].clean_accuracy:.1f} % (" in find("#chart .tip").text
    find("#legend button").click()
    assert len(browser.find_elements("css selector", "#chart .curve")) < 3
    find("#legend button").click()

    # the explorer: the slider changes the image, the arrows and what is said
    slider = find("#ex-slider")
    move = (
        "const s = document.getElementById('ex-slider'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    seen = set()
    for step in range(len(RADII) + 1):
        browser.execute_script(move, step)
        text = find("#ex-said").text
        seen.add(text)
        arrows = browser.find_elements("css selector", "#ex-svg path")
        assert bool(arrows) == (step > 0)
        assert (find("#ex-z").get_attribute("src") == find("#ex-x").get_attribute("src")) == (
            step == 0
        )
    assert len(seen) == len(RADII) + 1 and f"radius {RADII[-1]:g}" in text
    slider.send_keys("\ue012")  # the left arrow key
    assert f"radius {RADII[-2]:g}" in find("#ex-said").text
    first = find("#ex-x").get_attribute("src")
    browser.find_elements("css selector", "#ex-thumbs button")[1].click()
    assert find("#ex-x").get_attribute("src") != first
    find("#ex-arrows").click()
    assert not browser.find_elements("css selector", "#ex-svg path")

    # the gallery's filters
    def visible() -> list[Any]:
        return [c for c in browser.find_elements("css selector", ".card") if c.is_displayed()]

    assert len(visible()) == 12
    find("#more").click()
    whole = len(visible())
    assert whole == sum(len(e) for e in evaluations)
    find("#filters select[name=outcome] option[value=broken]").click()
    broken = visible()
    assert 0 < len(broken) < whole and {c.get_attribute("data-outcome") for c in broken} == {
        "broken"
    }
    find(f"#filters select[name=radius] option[value='{RADII[0]}']").click()
    assert all(float(c.get_attribute("data-radius")) <= RADII[0] for c in visible())
    assert find("#count").text.startswith(f"{len(visible())} of {whole}")
    find("#filters button[type=reset]").click()
    wait(lambda: len(visible()) == 12)

    # light and dark
    def background() -> str:
        return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    before = background()
    find("#theme").click()
    assert background() != before

    # nothing was executed that should not be, nothing failed, nothing was asked of the network
    assert (
        browser.execute_script("return document.querySelectorAll('.ranking tbody tr').length") == 2
    )
    assert NASTY in find(".ranking").text
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    requests = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            requests.append(message["params"]["request"]["url"])
    assert requests and [u for u in requests if u.startswith(("http", "ws", "ftp"))] == []
    assert browser.save_screenshot(str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").stat().st_size > 20_000
