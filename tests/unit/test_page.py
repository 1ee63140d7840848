"""The page of a front: what it holds, and what it does in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import BINARY, Page

import energylens
from energylens.cli import main
from energylens.explore import OBJECTIVES
from energylens.report.page import frontier_page
from energylens.results.search import Frontier
from energylens.spec.system import Overlapping

pytestmark = pytest.mark.usefixtures("no_debug")


def command(device: str) -> str:
    return f"energylens predict llama3_8b --device {device}"


CONTEXTS = (256, 1024, 4096, 400_000)


def search(**rest: Any) -> Frontier:
    words: dict[str, Any] = {"gpus": 4, "batch": range(1, 65), "contexts": CONTEXTS, "top": 12}
    result = energylens.explore("llama3_8b", **(words | rest))
    assert isinstance(result, Frontier), result
    return result


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return search(max_tpot_s=0.0066)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_data_of_the_page_are_those_of_the_search(frontier: Frontier) -> None:
    data = data_of(frontier_page(frontier, command))
    assert len(data["configs"]["batch"]) == len(frontier.configs)
    for i, c in enumerate(frontier.configs):
        assert data["configs"]["batch"][i] == c.batch
        for name, column in data["configs"]["values"].items():
            assert column[i] == pytest.approx(c.values[name], rel=1e-9)
    for e in data["exact"]:
        p = frontier.configs[e["index"]].prediction
        assert p is not None
        for name, phase in p.phases.items():
            parts = [r["energy_j"] for r in e["breakdown"] if r["phase"] == name]
            assert sum(parts) == pytest.approx(phase.energy_j, rel=1e-6)
    assert [limit["given"] for limit in data["limits"]] == [None, 0.0066, None, None]


def test_contexts_are_decode_steps_of_the_front_that_fit(frontier: Frontier) -> None:
    for c in frontier.configs:
        if not (c.exact and c.on_frontier):
            assert c.by_context == ()
            continue
        contexts = [point.context_len for point in c.by_context]
        assert contexts == list(CONTEXTS[: len(contexts)])
        assert contexts[:3] == list(CONTEXTS[:3])
        held = (c.batch * 400_000 * 131072 + 16.06e9) / c.parallelism.tp + 4e9  # and activations
        if not 140e9 < held < 150.75e9:
            assert (len(contexts) == 4) == (held < 150.75e9)
        energies = [point.energy_per_token_j for point in c.by_context]
        assert energies == sorted(energies)
        (own,) = (p for p in c.by_context if p.context_len == 1024)
        alone = energylens.predict(
            "llama3_8b",
            tp=c.parallelism.tp,
            replicas=c.parallelism.replicas,
            batch=c.batch,
            context_len=1024,
            phases=["decode"],
        )
        assert own.energy_per_token_j == pytest.approx(alone.energy_per_token_j, rel=1e-9)  # type: ignore[union-attr]


def test_no_text_of_a_spec_ends_the_script(frontier: Frontier) -> None:
    evil = "</script><script>alert(1)</script>@css@"
    page = frontier_page(replace(frontier, spec=evil, source_id=evil), command)
    assert data_of(page)["heading"].startswith(evil)
    assert page.count("<script") == 3
    assert "<title>&lt;/script&gt;" in page


class _Labels(HTMLParser):
    """Controls outside of a label and without a name of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.nameless, self.controls = 0, [], 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag == "label"
        if tag in ("input", "select"):
            self.controls += 1
            if not self.depth and "aria-label" not in dict(attrs):
                self.nameless.append(attrs)

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "label"


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_what_is_behind_them(frontier: Frontier) -> None:
    page = frontier_page(frontier, command)
    themes = re.findall(r":root(?:\[data-theme=\"dark\"\])? \{(.*?)\}", page, re.S)
    assert len(themes) == 2
    script = page[page.rindex("<script>") :]
    for mode, theme in zip(("light", "dark"), themes, strict=True):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", theme))
        for text in ("text", "soft", "accent"):  # WCAG 2.2 AA: 4.5 for text, 3 for shapes
            for back in ("back", "card"):
                assert contrast(colours[text], colours[back]) >= 4.5, (mode, text, back)
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
        lines = re.search(rf"const COLOURS = \{{.*?{mode}: \[(.*?)\]", script, re.S)
        assert lines
        for colour in re.findall(r"#[0-9a-f]{6}", lines[1]):
            assert contrast(colour, colours["back"]) >= 3.0, (mode, colour)


# ---------------------------------------------------------------- in a browser

browser = pytest.mark.skipif(BINARY is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, frontier: Frontier) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    file = folder / "front.html"
    file.write_text(frontier_page(frontier, command), encoding="utf-8")
    with Page(folder / "profile") as page:
        page.open(file)
        yield page
        assert page.complaints == []
        assert page.requests == [file.resolve().as_uri()]


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "page" in request.fixturenames:
        request.getfixturevalue("page").run("document.getElementById('reset').click()")


def front(page: Page) -> list[int]:
    found: list[int] = page.run("energylens.view.front.map((c) => c.i)")
    return found


def beaten(rows: list[list[float]], own: list[float]) -> bool:
    return any(
        all(a <= b for a, b in zip(r, own, strict=True)) and r != own for r in rows if r != own
    )


@browser
def test_the_page_shows_the_front_of_the_search(page: Page, frontier: Frontier) -> None:
    configs = frontier.configs
    assert [configs[i].id for i in front(page)] == [c.id for c in frontier.front]
    shown = page.run("document.getElementById('front').tBodies[0].rows.length")
    assert shown == sum(c.exact for c in frontier.front)
    marks = page.run(
        "[...energylens.view.marks].map(([c, m]) => [c.i, m.best.join(' '), m.tied.join(' ')])"
    )
    expected = {
        (i, " ".join(c.best_of), " ".join(c.tied_on))
        for i, c in enumerate(configs)
        if c.exact and not c.filtered_by
    }
    assert {tuple(m) for m in marks} == expected
    text = page.run("document.body.innerText")
    assert "8.00 (8.00" not in text and "NaN" not in text and "undefined" not in text


@browser
def test_filters_leave_the_front_of_what_passes(page: Page, frontier: Frontier) -> None:
    page.run(
        """
        document.querySelector('#layouts input').click();
        const most = document.getElementById('batch-max');
        most.value = 40; most.dispatchEvent(new Event('input'));
        const slider = document.querySelector('[data-limit=max_ttft_s]');
        slider.value = 620; slider.dispatchEvent(new Event('input'));
        """
    )
    limit = page.run("document.querySelector('[data-limit=max_ttft_s] + output').textContent")
    first = frontier.configs[0].parallelism
    times = [c.values["ttft_s"] for c in frontier.configs]
    most = min(times) * (max(times) / min(times)) ** 0.62
    assert limit == f"{1e3 * most:.{max(0, 3 - len(str(int(1e3 * most))))}f} ms"
    left = {
        i: [sign * c.values[value] for value, sign in (OBJECTIVES[o] for o in frontier.objectives)]
        for i, c in enumerate(frontier.configs)
        if not c.filtered_by
        and c.parallelism != first
        and c.batch <= 40
        and c.values["ttft_s"] <= most
    }
    assert 10 < len(left) < len(frontier.configs)
    expected = {i for i, own in left.items() if not beaten(list(left.values()), own)}
    assert set(front(page)) == expected
    status = page.run("document.getElementById('status').textContent")
    assert status.startswith(f"{len(left)} of {len(frontier.configs)} configurations, ")
    page.run("document.getElementById('reset').click()")
    assert [frontier.configs[i].id for i in front(page)] == [c.id for c in frontier.front]


@browser
def test_a_limit_can_be_taken_off(page: Page, frontier: Frontier) -> None:
    page.run(
        """
        const slider = document.querySelector('[data-limit=max_tpot_s]');
        slider.value = 1000; slider.dispatchEvent(new Event('input'));
        """
    )
    assert page.run("energylens.view.rows.length") == len(frontier.configs)
    assert any(c.filtered_by for c in frontier.configs)


@browser
def test_nothing_left_is_said(page: Page) -> None:
    page.run("document.getElementById('none').click()")
    assert "0 of " in page.run("document.getElementById('status').textContent")
    heading = page.run("document.getElementById('selected-heading').textContent")
    assert heading == "Nothing is left by the filters"
    page.run("document.getElementById('all').click()")
    assert page.run("energylens.selected !== null")


@browser
def test_keys_walk_along_the_front(page: Page) -> None:
    page.run("document.getElementById('scatter').focus()")
    along = page.run(
        "[...energylens.view.front].sort((a, b) => energylens.value(a, 'tpot_s')"
        " - energylens.value(b, 'tpot_s')).map((c) => c.i)"
    )
    start = page.run("energylens.selected.i")
    assert start == along[-1], "the thriftiest is the slowest"
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.press("ArrowRight")
    assert page.run("energylens.selected.i") == along[-2]
    assert "selected tp" in page.run("document.getElementById('status').textContent")


@browser
def test_a_row_of_the_table_selects_and_explains(page: Page, frontier: Frontier) -> None:
    page.run("document.querySelector('#front tbody tr:last-child button').click()")
    best = frontier.best("tpot")
    assert page.run("energylens.selected.i") == frontier.configs.index(best)
    text = page.run("document.getElementById('selected').innerText")
    assert "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size" in text
    assert "energylens predict llama3_8b --device h200 --tp" in text
    assert "gate+up" in text
    assert page.run("document.querySelectorAll('tr[aria-current=true]').length") == 1


@browser
def test_every_control_changes_what_is_drawn(page: Page) -> None:
    for control, chart in (
        ("axis-x", "scatter"),
        ("axis-y", "scatter"),
        ("bars-phase", "bars"),
        ("bars-by", "bars"),
        ("bars-as", "bars"),
        ("batch-of", "batches"),
    ):
        picture = f"document.getElementById('{chart}').toDataURL()"
        before = page.run(picture)
        page.run(
            f"const c = document.getElementById('{control}');"
            "c.selectedIndex = (c.selectedIndex + 1) % c.options.length;"
            "c.dispatchEvent(new Event('change'))"
        )
        assert page.run(picture) != before, control
    for chart in ("scatter", "bars", "batches", "contexts"):
        label = page.run(f"document.getElementById('{chart}').getAttribute('aria-label')")
        assert "against" in label or "Energy" in label
    labels = _Labels()
    labels.feed(page.run("document.getElementById('filters').outerHTML"))
    assert labels.controls > 6 and labels.nameless == []


@browser
def test_the_theme_is_the_systems_until_one_is_chosen(page: Page) -> None:
    back, theme = (
        "getComputedStyle(document.body).backgroundColor",
        "document.documentElement.dataset.theme",
    )
    light = page.run(back)
    page.dark(True)
    page.wait(f"{theme} === 'dark'")
    assert page.run(back) != light
    page.dark(False)
    page.wait(f"{theme} === 'light'")
    assert page.run(back) == light
    page.run("document.getElementById('theme').click()")
    assert page.run(theme) == "dark"
    page.run("for (const _ of [1, 2]) document.getElementById('theme').click()")
    assert page.run(theme) == "light"


@browser
def test_paper_is_light_and_holds_the_whole_table(page: Page, tmp_path: Path) -> None:
    page.dark(True)
    page.wait("document.documentElement.dataset.theme === 'dark'")
    page.paper(tmp_path / "front.pdf")
    assert (tmp_path / "front.pdf").read_bytes().startswith(b"%PDF")
    page.call("Emulation.setEmulatedMedia", media="print")
    page.wait("document.documentElement.dataset.theme === 'light'")
    box = "document.querySelector('#front-section .scroll')"
    assert page.run(f"{box}.scrollHeight <= {box}.clientHeight + 1")
    assert page.run("getComputedStyle(document.getElementById('theme')).display") == "none"
    page.call("Emulation.setEmulatedMedia", media="")


@browser
@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_page_does_not_scroll_sideways(page: Page, width: int) -> None:
    page.size(width, 800)
    page.wait(f"document.documentElement.scrollWidth <= {width}")
    page.size(1280, 900)


@browser
def test_other_objectives_and_single_tokens_have_a_page_too(tmp_path: Path) -> None:
    f = search(
        gen_len=1, objectives=["energy_per_prompt", "ttft", "gpus"], batch=(1, 2, 8), contexts=()
    )
    file = tmp_path / "one.html"
    file.write_text(frontier_page(f, command), encoding="utf-8")
    with Page(tmp_path / "profile") as page:
        page.open(file)
        assert [f.configs[i].id for i in front(page)] == [c.id for c in f.front]
        assert page.run("document.getElementById('axis-x').value") == "ttft_s"
        assert "null" not in page.run("document.body.innerText")
        assert page.complaints == []


@browser
def test_pairs_that_differ_in_the_prefill_batch_can_be_told_apart(tmp_path: Path) -> None:
    objectives = ["energy_per_request", "ttft", "tpot"]
    f = search(batch=(1, 2, 4, 64), objectives=objectives, disaggregate=True, contexts=(), top=30)
    file = tmp_path / "pairs.html"
    file.write_text(frontier_page(f, command), encoding="utf-8")
    with Page(tmp_path / "profile") as page:
        page.open(file)
        buttons = "[...document.querySelectorAll('#front tbody button')]"
        names = page.run(f"{buttons}.map((button) => button.innerText)")
        shown = [c for c in f.front if c.exact]
        assert len(names) == len(set(names)) == len(shown)
        for name, c in zip(names, shown, strict=True):
            batch = f"{c.prefill.batch}/{c.batch}" if c.prefill else f"{c.batch}"
            assert name.endswith(f", batch {batch}")
        assert page.complaints == []


@browser
def test_an_overlap_is_in_the_names_of_what_has_one(tmp_path: Path) -> None:
    words = {"gpus": 2, "tp": 2, "prompt_len": 4096, "batch": range(1, 9), "contexts": (1024,)}
    ways = [Overlapping(), Overlapping(sm=16, chunks=4), Overlapping(sm=16, chunks=8)]
    f = search(**words, overlap=ways, objectives=["ttft", "energy_per_prompt"], top=24)
    best = f.best("energy_per_prompt")
    assert str(best.parallelism.overlap) == "16x4"
    file = tmp_path / "overlaps.html"
    file.write_text(frontier_page(f, command), encoding="utf-8")
    with Page(tmp_path / "profile") as page:
        page.open(file)
        boxes = "[...document.querySelectorAll('#layouts label')].map((l) => l.innerText.trim())"
        assert page.run(boxes) == ["tp2", "tp2 overlap 16x4", "tp2 overlap 16x8"]
        assert f"tp2 overlap 16x4, batch {best.batch}" in page.run(
            "document.getElementById('picks').innerText"
        )
        page.run(
            "[...document.querySelectorAll('#front tbody button')]"
            f".find((b) => b.innerText === 'tp2 overlap 16x4, batch {best.batch}').click()"
        )
        shown = page.run("document.getElementById('selected-body').innerText")
        assert f"--tp 2 --overlap 16x4 --batch {best.batch}" in shown
        assert "without the overlap, for which vllm has no switch" in shown
        assert page.complaints == []


# ---------------------------------------------------------------- the verb


def test_the_verb_writes_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "front.html"
    words = ["explore", "llama3_8b", "--gpus", "2", "--batch", "1..4", "--html", str(file)]
    assert main([*words, "--price-per-gpu-hour", "2"]) == 0
    data = data_of(file.read_text(encoding="utf-8"))
    assert "cost_per_million_tokens" in data["configs"]["values"]
    assert [p[0] for p in data["exact"][0]["by_context"]] == [144, 288, 576, 1152, 2304, 4608, 9216]
    assert [p.name for p in tmp_path.iterdir()] == ["front.html"]
    assert main([*words[:-1], "front.pdf"]) == 2
    assert "--html: front.pdf found, and must end in .html, .htm" in capsys.readouterr().err
