"""docs/claims.md says what was stored in experiments/results, and all pages and pictures are drawn
from it."""

import json
from pathlib import Path

import pytest

from experiments import claims, collapse, judge, moe, tradeoff
from experiments.library import pictures
from experiments.library.study import by_name, cell

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
SECTIONS = {section.split("\n")[0]: section for section in TEXT.split("\n## ")[1:]}


def stored(name):
    """The result, with rows by their names."""
    result = json.loads((ROOT / f"experiments/results/{name}.json").read_text(encoding="utf-8"))
    return {key: by_name(value) if isinstance(value, list) else value
            for key, value in result.items()}


def says(start, figures, digits=3, times=1):
    """Whether the section that starts so has these figures."""
    [section] = [text for title, text in SECTIONS.items() if title.startswith(start)]
    words = " ".join(section.split()).replace("−", "-")
    for of in figures:
        scaled = {key: times * of[key] for key in ("mean", "std")}
        assert f" {cell(scaled, f'.{digits}f')}" in words, of


def test_the_page_says_what_claims_found():
    result = {name: by_name(own["rows"]) for name, own in stored("claims").items()}
    two = ["1/|o|: k = 2: share of the norms", "1/|o|: k = 2: cosine",
           "token mean: k = 2: share of the norms"]
    noise = [f"G = {size}: noise of 64 completions" for size in (2, 4, 8, 16, 64)]
    later = result["kl"]["later"]
    for stage in claims.STAGES:
        says("A completion with a small", [result["advantage"][stage][name] for name in two])
        says("G answers", [result["pairs"][stage][name] for name in noise], 1)
    says("k3 estimates", [later[f"after 100 steps: std of k{i}"] for i in (1, 3)])
    says("k3 estimates", [
        later[f"after 100 steps, without the first token: std of k{i}"] for i in (1, 3)])


def test_the_page_says_what_a_real_model_found():
    figures = json.loads((ROOT / "experiments/results/claims_real.json").read_text())["figures"]
    for stage in claims.STAGES:
        says("A completion with a small", [
            figures[stage][f"1/|o|: k = 2: {what}"] for what in ("share of the norms", "cosine")])


def test_the_page_says_where_runs_collapse():
    """The edge of each row and its accuracy at 0.0004, in the order of the page."""
    rows = stored("collapse")["rows"]
    section = TEXT.split("and collapses\n")[1]
    lines = [line.split(" | ")[1:] for line in section.splitlines() if line.startswith("| ")][1:9]
    for line, guard in zip(lines, collapse.GUARDS, strict=True):
        accuracy = cell(rows[f"{guard}, 0.0004"]["sampled"], ".3f")
        assert line == [collapse.edge(rows, guard), f"{accuracy} |"]


def test_the_page_says_what_judges_did():
    result = json.loads((ROOT / "experiments/results/judge.json").read_text())
    runs, stops = by_name(result["runs"]), judge.all_stops(result)
    says("A rule beats", [runs[name]["held-out"] for name in runs if name[:3] != "off"])
    says("A rule beats", [result["judges"][0]["accuracy"], runs["judge, β = 0"]["best"]])
    names = [f"{reward}, X = {X:g}" for reward in ("judge", "rule") for X in judge.STOPS]
    says("Stopping early", [stops[name]["held-out"] for name in names])
    says("Stopping early", [runs["off by one, β = 0"]["held-out"]])


def test_the_page_says_what_mixtures_found():
    result, start = stored("moe"), "GSPO's one ratio"
    says(start, [row["accuracy"] for name, row in result["bases"].items() if name != moe.MANY])
    for kind in moe.KINDS:
        row = result["ratios"][f"{moe.LR}, {kind}"]
        ways = [way for way in ("8, own", "8, replay") if f"{way}: tokens, 99 %" in row]
        says(start, [row[f"{way}: tokens, 99 %"] for way in ways], 2)
        if kind == moe.MIXTURE:
            says(start, [row[f"{way}: sequences, 99 %"] for way in ways], 2)
            says(start, [row["8, own: changed choices"]], 1, times=100)
    for name, row in result["runs"].items():
        if not name.endswith("token"):
            says(start, [row["sampled"]])
            if name.startswith(str(moe.LR)):
                says(start, [row["clipped"]], 1, times=100)


def test_the_page_says_what_two_rewards_did():
    result, start = stored("tradeoff"), "One sum of rewards"
    for name in tradeoff.ALGORITHMS:
        runs = [result["runs"][f"{name}, {weight:g}"] for weight in tradeoff.WEIGHTS]
        says(start, [run[figure] for run in runs for figure in ("accuracy", "sum, last quarter")])
        says(start, [result["kinds"]["base"][f"{name}, 1: different groups"]], 0)
        says(start, [result["kinds"][stage][f"{name}, 0.75: A of a wrong guess"]
                     for stage in claims.STAGES], 2)


NAMES = ("table1", "family", "ppo", "factorial", "tool", "claims", "collapse", "dynamic", "judge",
         "moe", "tradeoff")  # the other tables have nothing that these have not


@pytest.mark.parametrize("name", NAMES)
def test_pages_and_pictures_are_drawn_from_what_is_stored(name, tmp_path, monkeypatch):
    """The page is that of the repository, the figures are not touched, and there is a picture."""
    monkeypatch.setattr(pictures, "OUTPUT", tmp_path)
    pictures.main([name])
    for kind in ("md", "json"):
        drawn, kept = (folder / f"{name}.{kind}" for folder in (tmp_path, pictures.RESULTS))
        assert drawn.read_text() == kept.read_text()
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn and all((pictures.RESULTS / picture).exists() for picture in drawn)
