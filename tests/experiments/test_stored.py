"""docs/claims.md says what was stored in experiments/results, and all pages and pictures are drawn
from it."""

import json
import re
from pathlib import Path

import pytest

from experiments import judge
from experiments.library import pictures
from experiments.library.study import by_name, cell

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/claims.md").read_text(encoding="utf-8")


def stored(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text(encoding="utf-8"))


def says(section, of, digits=3, times=1):
    """Whether the section of the page that begins so has this figure."""
    words = " ".join(TEXT.split(f"\n## {section}")[1].split("\n## ")[0].split()).replace("−", "-")
    text = cell({key: times * of[key] for key in ("mean", "std")}, f".{digits}f")
    return re.search(rf"(?<![\d.]){re.escape(text)}", words)


STAGES = ["base", "later"]
KINDS = ["8 experts, 2 active", "32 experts, 4 active", "dense, as many in total",
         "dense, as many active"]
MIXTURE, MANY, DENSE, SMALL = KINDS
RUNS = [f"{lr}, {kind}, {algorithm}" for lr in ("0.0003", "0.0006")
        for kind in (MIXTURE, DENSE, SMALL) for algorithm in ("grpo", "gspo")]
REWARDS = [f"{name}, {weight}" for name in ("grpo", "gdpo") for weight in ("0.5", "0.75", "1")]


@pytest.mark.parametrize("section, name, part, rows, figures, digits, times", [
    ("A completion with a small", "claims", "advantage", STAGES, [
        "1/|o|: k = 2: share of the norms", "1/|o|: k = 2: cosine",
        "token mean: k = 2: share of the norms"], 3, 1),
    ("A completion with a small", "claims_real", "figures", STAGES, [
        "1/|o|: k = 2: share of the norms", "1/|o|: k = 2: cosine"], 3, 1),
    ("G answers give", "claims", "pairs", STAGES, [
        f"G = {size}: noise of 64 completions" for size in (2, 4, 8, 16, 64)], 1, 1),
    ("k3 estimates", "claims", "kl", ["later"], [
        f"after 100 steps{where}: std of k{i}" for where in ("", ", without the first token")
        for i in (1, 3)], 3, 1),
    ("RL only sharpens", "claims", "pass", STAGES, [
        f"pass@{k}" for k in (1, 4, 8, 16, 64)], 3, 1),
    ("A group with equal", "claims", "pairs", STAGES, ["G = 16: groups with equal rewards"], 3, 1),
    ("A rule beats", "judge", "judges", ["judge"], ["accuracy"], 3, 1),
    ("A rule beats", "judge", "runs", [
        "rule, β = 0", *(f"judge, β = {beta}" for beta in ("0", "0.04", "0.5"))],
     ["held-out"], 3, 1),
    ("A rule beats", "judge", "runs", ["judge, β = 0"], ["best"], 3, 1),
    ("Stopping early", "judge", "runs", ["off by one, β = 0"], ["held-out"], 3, 1),
    ("GSPO's one ratio", "moe", "bases", [MIXTURE, DENSE, SMALL], ["accuracy"], 3, 1),
    ("GSPO's one ratio", "moe", "ratios", [
        f"0.0003, {kind}" for kind in KINDS], ["8, own: tokens, 99 %"], 2, 1),
    ("GSPO's one ratio", "moe", "ratios", [f"0.0003, {kind}" for kind in (MIXTURE, MANY)],
     ["8, replay: tokens, 99 %"], 2, 1),
    ("GSPO's one ratio", "moe", "ratios", [f"0.0003, {MIXTURE}"], [
        "8, own: sequences, 99 %", "8, replay: sequences, 99 %"], 2, 1),
    ("GSPO's one ratio", "moe", "ratios", [f"0.0003, {kind}" for kind in (DENSE, SMALL)],
     ["8, own: sequences, 99 %"], 2, 1),
    ("GSPO's one ratio", "moe", "ratios", [f"0.0003, {MIXTURE}"], ["8, own: changed choices"],
     1, 100),
    ("GSPO's one ratio", "moe", "runs", RUNS, ["sampled"], 3, 1),
    ("GSPO's one ratio", "moe", "runs", RUNS[:6], ["clipped"], 1, 100),
    ("One sum of rewards", "tradeoff", "runs", REWARDS, ["accuracy", "sum, last quarter"], 3, 1),
    ("One sum of rewards", "tradeoff", "kinds", STAGES, [
        "grpo, 0.75: A of a wrong guess", "gdpo, 0.75: A of a wrong guess"], 2, 1),
    ("One sum of rewards", "tradeoff", "kinds", ["base"], [
        "grpo, 1: different groups", "gdpo, 1: different groups"], 0, 1),
])
def test_the_page_says_what_was_stored(section, name, part, rows, figures, digits, times):
    found = stored(name)[part]
    found = found.get("rows", found) if isinstance(found, dict) else found
    found = by_name(found) if isinstance(found, list) else found
    missing = [(row, figure) for row in rows for figure in figures
               if not says(section, found[row][figure], digits, times)]
    assert not missing


def test_a_row_of_the_table_says_what_its_section_says():
    """The verdict, and the number: in the section it has more digits, or is no percentage."""
    rows = re.findall(r"\| .&nbsp;(.*?) \| \[(.*)\]\(.*\*\*(?:k = )?([\d.]+)( %)?", TEXT)
    assert len(rows) == 18
    for verdict, sentence, number, percent in rows:
        section = TEXT.split(f"\n## {sentence}\n".replace("\\", ""))[1].split("<details>")[0]
        assert section.strip().startswith(f"**{verdict.capitalize()}")
        digits = len(number.partition(".")[2])
        said = [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*(?:\.\d+)?", section)]
        near = [100 * x for x in said] + said if percent else said
        assert any(f"{x:.{digits}f}" == number for x in near), sentence


def test_the_page_says_where_runs_collapse():
    """The edge of each row and its accuracy at 0.0004, in the order of the page."""
    section = TEXT.split("and collapses\n")[1]
    lines = [line.split(" | ")[1:] for line in section.splitlines() if line.startswith("| ")][1:9]
    guards = {}  # each at growing learning rates
    for row in stored("collapse")["rows"]:
        guard, rate = row["name"].rsplit(", ", 1)
        guards.setdefault(guard, {})[rate] = row
    for line, rows in zip(lines, guards.values(), strict=True):
        collapsed = []
        for row in rows.values():
            both = zip(row["sampled"]["values"], row["base"]["values"])
            collapsed.append(any(own < base for own, base in both))
        edge = ["none", *rows][[*collapsed, True].index(True)]
        assert line == [edge, f"{cell(rows['0.0004']['sampled'], '.3f')} |"]


def test_the_page_says_what_each_stop_keeps():
    stops = judge.all_stops(stored("judge"))
    names = [f"{reward}, X = {X:g}" for reward in ("judge", "rule") for X in judge.STOPS]
    assert all(says("Stopping early", stops[name]["held-out"]) for name in names)


NAMES = ("table1", "family", "ppo", "factorial", "tool", "claims", "judge",
         "real")  # the other tables have nothing that these have not


@pytest.mark.parametrize("name", NAMES)
def test_pages_and_pictures_are_drawn_from_what_is_stored(name, tmp_path):
    """The page is that of the repository, the figures are not touched, and there is a picture."""
    pictures.main(["--names", name, "--output", str(tmp_path)])
    for kind in ("md", "json"):
        drawn, kept = (folder / f"{name}.{kind}" for folder in (tmp_path, pictures.STORED))
        assert drawn.read_text() == kept.read_text()
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn and all((pictures.STORED / picture).exists() for picture in drawn)
