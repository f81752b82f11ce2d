"""The site that docs/publish.py builds: no link of it is dead, and nothing is loaded from a
network."""

import re

from docs import publish
from tests.helpers.runs import ROOT


def test_every_link_leads_to_a_page_of_the_site_or_to_a_file_of_the_project(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/name")
    publish.main([str(tmp_path)])
    assert (tmp_path / "index.html").read_text() == (tmp_path / "you.html").read_text()
    for name in publish.PAGES:
        text = (tmp_path / name).read_text()
        assert "OWNER/NAME" not in text and "https://owner.github.io/name/card.png" in text
        for link in re.findall(r'<a\b[^>]*? href="([^"]+)"', text):
            place, _, _ = link.partition("#")
            file = place.removeprefix("https://github.com/Owner/name/blob/main/")
            known = place.startswith("https://") and file == place or not place
            assert known or (ROOT / file).is_file() or (tmp_path / place).is_file(), link
        for picture in re.findall(r'<(?:img|script|link)\b[^>]*? (?:src|href)="([^"]+)"', text):
            assert picture.startswith("data:"), name
