"""What the documents name exists: links, make targets, commands and their options."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from loadgen.entry import build

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z][a-z-]+)\b")
COMMAND = re.compile(r"\babserve((?: [a-z][a-z0-9-]*)+)([^\n`|]*)")
MOST_WORDS = 61_600
"""Of all pages but results. Cut the largest page before this number: `wc -w docs/*.md docs/adr/*.md | sort -n`."""
NOT_TARGETS = {"it", "sure", "the", "up", "and", "them", "compare-and"}

ROOT_COMMAND = typer.main.get_command(build())


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words lead to, and the words that are left."""
    command: Any = ROOT_COMMAND  # typer may bring a click of its own, so no isinstance
    while words and words[0] in getattr(command, "commands", {}):
        command = command.get_command(None, words[0])
        words = words[1:]
    return command, words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    missing = [target for target in LINK.findall(path.read_text()) if not (path.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_a_document_lead_to_a_heading(path: Path) -> None:
    wrong = []
    for target, anchor in ANCHOR.findall(path.read_text()):
        document = path.parent / target if target else path
        if document.suffix == ".md" and anchor not in {slug(h) for h in HEADING.findall(document.read_text())}:
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def slug(heading: str) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    named = set(MAKE.findall("\n".join(code(path)))) - NOT_TARGETS
    assert named <= TARGETS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(path: Path) -> None:
    wrong = []
    for line in code(path):
        for words, rest in (found for part in re.split(r"(?=\babserve )", line) for found in COMMAND.findall(part)):
            command, left = resolve(words.split())
            if command is ROOT_COMMAND:
                wrong.append(f"abserve {left[0]}")
                continue
            known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
            wrong += [
                option for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest) if option not in known | {"--help"}
            ]
    assert wrong == []


def test_no_page_of_the_site_links_out_of_it() -> None:
    """The site has docs/ alone, and its builder refuses such a link."""
    docs = ROOT / "docs"
    leaving = [
        (path.name, target)
        for path in docs.rglob("*.md")
        for target in LINK.findall(path.read_text())
        if not (path.parent / target).resolve().is_relative_to(docs)
    ]
    assert leaving == []


def test_the_sites_navigation_has_every_page_once() -> None:
    """All but the tables of published runs, to which docs/results/README.md links."""
    chapters = tomllib.loads((ROOT / ".ci/zensical.toml").read_text())["project"]["nav"]
    parts = [part for chapter in chapters for part in chapter.values()]
    listed = [page for part in parts for page in ([part] if isinstance(part, str) else part)]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(page for page in pages if not re.match(r"results/\d{4}-", page))


def test_the_pages_stay_short_enough_to_be_read() -> None:
    docs = ROOT / "docs"
    pages = {
        str(path): len(path.read_text().split()) for path in docs.rglob("*.md") if docs / "results" not in path.parents
    }
    assert sum(pages.values()) <= MOST_WORDS, sorted(pages, key=lambda page: -pages[page])[:5]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def code(path: Path) -> list[str]:
    """Lines of code blocks and inline code: what a reader would type."""
    text = path.read_text()
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", outside)


def test_there_is_something_to_check() -> None:
    readme = code(ROOT / "README.md")
    assert any(COMMAND.search(line) for line in readme)
    assert any(MAKE.search(line) for line in readme)
    assert resolve(["serve", "native"])[0].name == "native"
    assert resolve(["no-such-command"])[0] is ROOT_COMMAND
