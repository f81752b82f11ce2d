"""The site that docs/publish.py builds: every page leads home, no link of it is dead, and nothing
is loaded from a network."""

import re
import shutil
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

from docs import publish
from tests.helpers.runs import ROOT, python

PROJECT = "https://github.com/owner/name"
MADE_BY_HAND = {"index.html", "you.html", "live.html", "step.html"}  # after # come settings


def check_link(link, site):
    address, name = urldefrag(link)
    if address.startswith(f"{PROJECT}/") and address != f"{PROJECT}/deployments":
        kind, branch, path = address.removeprefix(f"{PROJECT}/").split("/", 2)
        assert branch == "main" and (ROOT / path).exists()
        assert kind == ("tree" if (ROOT / path).is_dir() else "blob")
    elif address.startswith("file:"):
        path = Path(unquote(urlparse(address).path))
        assert path in site or path.suffix == ".png" and path.is_file(), "it is not in the site"
        named = f'id="{unquote(name)}"'
        assert not name or path.name in MADE_BY_HAND or named in site[path]
    else:
        assert address.startswith("https://")


@pytest.mark.slow
def test_every_page_leads_home_and_has_no_dead_link(tmp_path):
    code, said = python("docs/publish.py", tmp_path, GITHUB_REPOSITORY="owner/name")
    assert code == 0, said
    site = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "you.html", "live.html", "1_grpo.html", "reading.html",
            "results.html", "lab.html", "slides.html"} <= {path.name for path in site}  # fmt: skip
    for path, page in site.items():
        for link in re.findall(r'<a\b[^>]*? href="([^"]+)"', page):
            check_link(urljoin(path.as_uri(), unescape(link)), site)
        bars = re.findall(r'<nav class="bar".*?</nav>', page)
        assert bars and all("you.html" in bar for bar in bars), path
        assert '<meta property="og:image" content="https://owner.github.io/name/card.png">' in page
        assert len(re.search('<meta name="description" content="([^"]*)"', page)[1]) > 5, path
        for picture in re.findall(r'<(?:img|script|link)\b[^>]*? (?:src|href)="([^"]+)"', page):
            assert picture.startswith("data:") or (path.parent / picture).is_file(), path


def test_one_command_writes_the_address_into_all_pages(tmp_path):
    """A page to play with is then named by its published address: a code host shows its source."""
    if publish.PLACEHOLDER not in (ROOT / "pyproject.toml").read_text():
        pytest.skip("the address is written already")
    written = [page for page in publish.PAGES if page.endswith(".md")]
    for name in [*written, "pyproject.toml", "CITATION.cff"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    publish.write_address("https://github.com/Owner/name", tmp_path)
    for name in written:
        text = (tmp_path / name).read_text()
        assert publish.PLACEHOLDER not in text and "deployments" not in text, name
        assert not re.search(r"\]\((?!https:)[^)]*(you|live|step)\.html", text), name
    readme = (tmp_path / "README.md").read_text()
    assert "[you are the reward](https://owner.github.io/name/you.html)" in readme
    assert "git clone https://github.com/Owner/name" in readme
    for address in ("https://github.com/Owner/name", "github.com/Owner"):  # again; no address
        with pytest.raises(SystemExit):
            publish.write_address(address, tmp_path)
