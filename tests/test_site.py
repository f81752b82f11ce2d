"""The site that docs/publish.py builds: in Chromium every page opens, and no link of it is dead."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = "https://github.com/owner/name"
MADE_BY_HAND = {"index.html", "you.html", "live.html", "step.html"}  # after # come settings
SEEN = """(() => {
  const all = selector => [...document.querySelectorAll(selector)];
  return {
    title: document.title,
    bars: all(".bar").filter(bar => bar.offsetParent).length,
    home: all(".bar a").map(link => link.href),
    formulas: all("math").filter(math => math instanceof MathMLElement).length,
    loaded: performance.getEntriesByType("resource").map(({ name }) => name),
    links: all("a[href]").map(link => link.href),
    names: all("[id]").map(node => node.id),
    broken: all("img").filter(picture => !picture.naturalWidth).map(picture => picture.src),
    width: document.documentElement.scrollWidth,
  };
})()"""


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory):
    """{a page: what Chromium sees in it on a phone}"""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "docs/publish.py", folder], cwd=ROOT, check=True,
                   env={**os.environ, "GITHUB_REPOSITORY": "owner/name"})
    seen = {}
    for path in sorted(folder.rglob("*.html")):
        page = chromium.open(str(path), 390, 844)
        seen[path] = page.run(SEEN)
        assert chromium.problems() == [], path
        page.ask("Page.close")
    return seen


def check_link(link, site):
    address, name = urldefrag(link)
    if address.startswith(f"{PROJECT}/") and address != f"{PROJECT}/deployments":
        kind, branch, path = address.removeprefix(f"{PROJECT}/").split("/", 2)
        assert branch == "main" and (ROOT / path).exists()
        assert kind == ("tree" if (ROOT / path).is_dir() else "blob")
    elif address.startswith("file:"):
        path = Path(unquote(urlparse(address).path))
        assert path in site or path.suffix == ".png" and path.is_file(), "it is not in the site"
        assert not name or path.name in MADE_BY_HAND or unquote(name) in site[path]["names"]
    else:
        assert address.startswith("https://")


@pytest.mark.slow
def test_every_page_opens_leads_home_and_has_no_dead_link(site):
    names = {path.name for path in site}
    assert {"index.html", "you.html", "live.html", "1_grpo.html", "reading.html",
            "results.html", "lab.html", "experiments.html", "slides.html"} <= names  # fmt: skip
    for path, seen in site.items():
        for link in seen["links"]:
            check_link(link, site)
        home = {link.rpartition("/")[2].partition("#")[0] for link in seen["home"]}
        assert seen["bars"] == 1 and {"you.html", "pages.html", "name"} <= home, path
        assert any("/zh/" in link for link in seen["home"]), path
        assert seen["title"] and seen["broken"] == [] and seen["width"] <= 390, path


def formulas_of(text):
    """How many $$…$$ and $…$ a text has outside of code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return (text.count("$") - 2 * text.count("$$")) // 2 + text.count("$$") // 2


@pytest.mark.slow
def test_every_formula_is_mathml_and_nothing_is_loaded_from_a_network(site):
    expected = {"slides.html": formulas_of((ROOT / "docs/slides.md").read_text())}
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        text = "".join(line for cell in cells if cell["cell_type"] == "markdown"
                       for line in cell["source"])
        expected[f"{path.stem}.html"] = formulas_of(text)
    assert sum(expected.values()) > 400
    for path, seen in site.items():
        assert seen["formulas"] == expected.get(path.name, 0), path
        assert not [name for name in seen["loaded"] if name.startswith("http")], path
