"""docs/claims.md says what was stored in experiments/results, and pages and pictures are drawn from
it."""

import re

import pytest

from experiments.library import pictures
from tests.helpers.runs import ROOT, json_of

TEXT = (ROOT / "docs/claims.md").read_text()
# a mean and a standard deviation, as the pages write them
SPREAD = r"\d[\d.]* ± \d[\d.]*\d"


def spreads_in(value):
    """The spreads in a stored result."""
    if isinstance(value, dict) and {"mean", "std"} <= value.keys():
        yield value
    elif isinstance(value, dict):
        yield from spreads_in(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from spreads_in(part)


def test_each_spread_of_the_page_is_stored():
    """With as many digits as the page has, or in percent."""
    stored = set()
    for path in pictures.STORED.glob("*.json"):
        for spread in spreads_in(json_of(path)):
            mean, std = abs(spread["mean"]), spread["std"]
            for digits in range(4):
                stored.add(f"{mean:.{digits}f} ± {std:.{digits}f}")
                stored.add(f"{100 * mean:.{digits}f} ± {100 * std:.{digits}f}")
    for path in pictures.STORED.glob("[!R]*.md"):  # not README.md, which only quotes
        stored.update(re.findall(SPREAD, path.read_text()))
    said = []
    for section in TEXT.split("\n## "):
        if not section.startswith("Clip-higher"):  # its commands make its figures
            said += re.findall(SPREAD, " ".join(section.split()))
    assert len(said) > 25 and not set(said) - stored


@pytest.mark.parametrize("name", [
    "table1", "family", "factorial", "controls", "learning_cpu", "pruned_baseline"])
def test_pages_and_pictures_are_drawn_from_what_is_stored(name, tmp_path):
    """The page is that of the repository, the figures are not touched, and there is a picture. The
    other tables have nothing that these have not. (test_docs.py: a page shows each picture.)"""
    pictures.main(["--names", name, "--output", str(tmp_path)])
    for kind in ("md", "json"):
        drawn, kept = (folder / f"{name}.{kind}" for folder in (tmp_path, pictures.STORED))
        assert drawn.read_text() == kept.read_text()
    assert [*tmp_path.glob("*.png")]
