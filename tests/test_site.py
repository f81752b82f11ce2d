"""The site that docs/publish.py builds: no link of it is dead, and nothing is loaded from a
network. One command writes its address into the project's pages."""

import re
import shutil

import pytest

from docs import publish
from tests.helpers.runs import ROOT


def test_every_link_leads_to_a_page_of_the_site_or_to_a_file_of_the_project(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/name")
    publish.main([str(tmp_path)])
    assert len(publish.PAGES) == 4
    for name in publish.PAGES:
        text = (tmp_path / name).read_text()
        assert '"https://owner.github.io/name/card.png"' in text
        links = re.findall(r'<a\b[^>]*? href="([^"]+)"', text)
        assert any(link.startswith("https://github.com/Owner/name/") for link in links)
        for link in links:
            place, _, _ = link.partition("#")
            file = place.removeprefix("https://github.com/Owner/name/blob/main/")
            there = tmp_path / place if file == place else ROOT / file
            assert not place or there.is_file(), link
        for picture in re.findall(r'<(?:img|script|link)\b[^>]*? (?:src|href)="([^"]+)"', text):
            assert picture.startswith("data:"), name


def test_one_command_writes_the_address_into_the_pages(tmp_path, monkeypatch):
    if publish.ADDRESS not in (ROOT / "pyproject.toml").read_text():
        pytest.skip("the address is written already")
    for path in (path for pattern in publish.NAMING for path in ROOT.glob(pattern)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    publish.main(["--address", "Owner/name"])
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        text = path.read_text()
        assert "github.com/OWNER" not in text and "THIS_REPOSITORY" not in text, path
        assert "deployments" not in text, path
        assert not re.search(r"\]\((?!https:)[^)]*(you|live|step)\.html", text), path
    readme = (tmp_path / "README.md").read_text()
    assert "[published pages](https://owner.github.io/name/)" in readme
    assert "](https://owner.github.io/name/step.html)" in readme
    assert "git clone https://github.com/Owner/name" in readme
    conformance = (tmp_path / "docs/conformance.md").read_text()
    assert "{repository: Owner/name, path: reference}" in conformance
    assert "a data set of the hub, OWNER/NAME" in (tmp_path / "docs/questions.md").read_text()
    for address in ("Owner/name", "https://github.com/Owner/name"):  # again; no such form
        with pytest.raises(SystemExit):
            publish.main(["--address", address])
