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
    assert len(publish.PAGES) == 5
    for name in publish.PAGES:
        text = (tmp_path / name).read_text()
        assert '"https://owner.github.io/name/card.png"' in text
        links = re.findall(r'<a\b[^>]*? href="((?!https://arxiv)[^"]+)"', text)
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
        pages = "index|you|live|step|slides"
        assert not re.search(rf"\]\((?!https:)[^)]*({pages})\.html", text), path
    readme = (tmp_path / "README.md").read_text()
    assert "](https://owner.github.io/name/step.html)" in readme
    with pytest.raises(SystemExit):  # once is enough
        publish.main(["--address", "Owner/name"])


# --- the slides ---


def test_the_slides_are_what_their_text_makes():
    pytest.importorskip("latex2mathml", reason="pip install -r requirements-dev.txt")
    from docs.slides import build

    # another version of the converter may write other MathML
    here, made = (re.sub("(<math.*?>).*?</math>", r"\1", text)
                  for text in (build.PAGE.read_text(), build.page()))
    assert here == made, "stale: python docs/slides/build.py"


def test_a_slide_has_at_most_60_words_and_a_note():
    for slide in (ROOT / "docs/slides.md").read_text().split("\n---\n"):
        text, note = slide.split("\n> ")
        assert re.match(r"\d minutes?\. ", note), note
        text = re.sub(r"\$.+?\$+|!\[.*?\]\(.*?\)|\]\(.*?\)", "", text)
        words = [word for word in text.split() if re.search(r"[^\W\d]", word)]
        assert len(words) <= 60, slide


KEY = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
FITS = "document.documentElement.scrollHeight <= innerHeight"
OUTSIDE = """[...document.querySelectorAll("section:not([hidden]) *")]
  .some(node => node.getBoundingClientRect().right > innerWidth)"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1280, 720), (390, 844)], ids=["laptop", "phone"])
def test_the_arrow_keys_turn_the_slides_and_each_fits(browser, size):
    page = browser.open(f"{ROOT}/docs/slides.html", *size)
    count = page.run("slides.length")
    for number in range(1, count + 1):
        assert page.run("shown") == number and page.run(FITS) and not page.run(OUTSIDE), number
        page.run(KEY % "ArrowRight")
    page.run(KEY % "ArrowLeft")
    page.run(KEY % "n")
    assert page.run("location.hash") == f"#{count - 1}"
    assert page.run("document.querySelector('section:not([hidden]) blockquote').offsetHeight") > 0
