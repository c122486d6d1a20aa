"""The page stands alone: no network, no script needed for the verdict, nothing from a server taken for markup."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

import loadgen.report.document as doc
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import MOST_ROWS, TABLE_WIDTHS, code, render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.report_page import Page, check_figures


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_html(result_document(analyse(write_run(tmp_path_factory.mktemp("run")))))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_nothing_is_loaded_from_anywhere(page: Page, text: str) -> None:
    assert page.loads == []
    assert "@import" not in text.split("<script", 1)[0]
    assert "default-src 'none'" in text


def test_no_button_uploads_the_measurements(text: str) -> None:
    """Plotly's default bar has "Share chart…", which sends the data to its makers' service."""
    script = text.rsplit("<script>", 1)[1]
    assert "modeBarButtons:" in script
    assert "loud" not in script


def test_the_verdict_needs_no_javascript(page: Page) -> None:
    order = ["VALID", "handles 1.4", "This machine has no GPU: this is a CPU comparison.", "B faster", "Why", "Proof"]
    shown = page.text[page.text.index("VALID") :]
    places = [shown.index(part) for part in order]
    assert places == sorted(places)
    for part in ("executing the model", "lowest cosine", "abserve compare --preset quick", "Arms as requested"):
        assert part in page.text


def test_every_figure_is_valid_plotly_with_known_colours(page: Page, text: str) -> None:
    assert set(page.figures) == {
        f"{name}-figure"
        for name in ("throughput", "stages", "latency", "batch-sizes", "batches", "cold-starts", "blocks")
    }
    check_figures(text)


def test_what_a_server_calls_itself_is_text(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    path = tmp_path / "arms.json"
    arms = json.loads(path.read_text())
    arms[1]["title"] = name
    path.write_text(json.dumps(arms))
    text = render_html(result_document(analyse(tmp_path)))
    assert "alert(1)</script>" not in text
    assert "<img src=x" not in text
    assert html.escape(name) in text
    assert Page(text).loads == []


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pairs=2, state="failed", cut_after=0),
        Plan(pairs=4, state="running", cut_after=50),
        Plan(pairs=2, parity_cosine=0.5),
    ],
    ids=["no blocks", "killed", "no parity"],
)
def test_an_invalid_run_says_so_first(tmp_path: Path, plan: Plan) -> None:
    page = Page(render_html(result_document(analyse(write_run(tmp_path, plan)))))
    after_links = page.text.split("Conditions")[1]
    assert after_links.strip().startswith("INVALID")
    assert " VALID" not in page.text.replace("INVALID", "")


def test_commands_in_a_remedy_are_set_as_code_and_the_rest_stays_text() -> None:
    assert code("run `abserve calibrate`, <b>") == "run <code>abserve calibrate</code>, &lt;b&gt;"


def test_a_hash_has_eight_characters_and_the_whole_one_in_a_tooltip() -> None:
    digest, gpu = "0123456789abcdef" * 4, "GPU-b823ecbd-bb17-cfb3-e35b-411dfeab51f3"
    assert code(f"sha256 {digest}, on {gpu}.") == (
        f'sha256 <abbr title="{digest}">01234567</abbr>, on <abbr title="{gpu}">GPU-b823ecbd</abbr>.'
    )
    table = doc.Table(doc.names("commit", "image"), [(digest[:40], f"python@sha256:{digest}")], name="t")
    document = doc.Document("d", {"": [doc.Section("s", (table, doc.Text(f"abserve {digest}", "code")))]})
    text = render_markdown(document)
    assert "| 01234567 | python@sha256:01234567 |" in text
    assert text.count(digest) == 1, "what is copied keeps all of it"
    assert digest in render_csv({"": document}, "t")


def test_rows_become_cards_with_the_names_of_their_columns_and_long_tables_open_on_demand() -> None:
    columns = doc.names("scenario", "arm")
    rows = [(f"load {n}", "A") for n in range(MOST_ROWS + 1)]
    for number, is_folded in ((MOST_ROWS, False), (MOST_ROWS + 1, True)):
        page = render_html(doc.Document("d", {"": [doc.Section("s", (doc.Table(columns, rows[:number]),))]}))
        assert (f"<summary>Show all {number} rows</summary>" in page) is is_folded
        assert page.count('data-label="arm">A</td>') == number
    style = page.split("<style>")[1].split("</style>")[0]
    for kind, (_, pixels) in TABLE_WIDTHS.items():
        assert f"@container (max-width: {pixels}px) {{ table.{kind} {{" in style
    assert style.count("@media screen { @container") == len(TABLE_WIDTHS) - 1, "paper has tables where they fit"
    assert "overflow-x: auto" not in style, "nothing scrolls sideways"


def channels(colour: str) -> list[float]:
    return [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2)."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_a_contrast_of_4_5(text: str, scheme: int) -> None:
    blocks = text.split("<style>")[1].split(":root {")[1:3]
    colours = dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6})", blocks[scheme].split("}")[0]))
    pairs = [(f"--{name}", f"--{name}-soft") for name in ("good", "bad", "warn")]
    pairs += [(name, back) for name in ("--ink", "--muted") for back in ("--card", "--page")]
    pairs += [(f"--arm-{n}", "--card") for n in range(8)] + [
        (f"--{name}", "--card") for name in ("good", "bad", "warn")
    ]
    for front, back in pairs:
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)
    for n in range(8):  # a label of an arm: its colour on a tenth of it
        own, card = channels(colours[f"--arm-{n}"]), channels(colours["--card"])
        mixed = "#" + "".join(f"{round(255 * (0.1 * a + 0.9 * b)):02x}" for a, b in zip(own, card, strict=True))
        assert contrast(colours[f"--arm-{n}"], mixed) >= 4.5, n
