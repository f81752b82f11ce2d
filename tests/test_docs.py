"""README and docs/ tell the truth: links, names, line counts, metrics, tables. What they tell a
reader to type is in test_typed.py."""

import ast
import importlib
import json
import re

import pytest
import torch

from docs import speedups
from engine.report.meanings import MEANINGS
from experiments.library.study import by_name
from tests.helpers.runs import ROOT, json_of
from tests.helpers.training import one_step

BOOK = ROOT / "docs/step/book.md"
ROOM = ROOT / "experiments/results"  # each page but its README was written with a result
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), BOOK, ROOM / "README.md"]
README = PAGES[0].read_text()
SITE = r"https://[\w-]+\.github\.io/[\w.-]+/"  # if the address of the pages is written into them
START = re.sub(SITE, "", (ROOT / "docs/README.md").read_text())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

OTHERS = [ROOT / ".github/CONTRIBUTING.md", ROOT / "family/diffs/README.md"]
OTHERS += [*sorted(ROOT.glob("docs/zh/*.md"))]
OTHERS += [*sorted(ROOT.glob("notebooks/*.md")), *sorted(ROOT.glob("notebooks/*.ipynb"))]


# --- the README is read in a minute ---


def test_the_readme_and_the_start_page_are_short_and_no_code_scrolls():
    for page in (README, START):
        assert len([word for word in page.split() if re.search(r"\w", word)]) <= 600
    assert len(re.findall(r"\]\(", README)) <= 25
    code = [line for _, block in FENCED.findall(README) for line in block.splitlines()]
    assert len(code) > 30 and max(map(len, code)) <= 80


# --- the twelve lines ---


def test_cppo_in_twelve_lines():
    [code] = [code for language, code in FENCED.findall(README) if language == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    torch.manual_seed(0)
    names = {}
    exec(code, names)
    # rewards 1, 0, 0, 0: A = 1.5 and three times −0.5 (the first is kept); 2, 1, 1, 0: A = ±√1.5
    # and twice 0
    assert names["rows"].tolist() == [0, 1, 4, 7]
    advantages = [1.5, -0.5, 1.5**0.5, -(1.5**0.5)]
    # every ratio is 1: the loss is minus the mean advantage of the kept
    assert names["loss"].item() == pytest.approx(-sum(advantages) / 4, abs=1e-3)
    assert names["model"].weight.grad.any()


# --- names and numbers ---


# a line of the house: a file, its lines, its place in the order; "name: " if one function is meant
STOPS = re.findall(r"^(\w+\.py) +~(\d+) lines +(?:\d  )?(?:(\w+): )?", README, re.MULTILINE)


@pytest.mark.parametrize("file, lines, function", STOPS)
def test_a_stop_has_about_as_many_lines_as_the_readme_says(file, lines, function):
    text = (ROOT / file).read_text()
    if function:
        [node] = [node for node in ast.parse(text).body if getattr(node, "name", None) == function]
        text = ast.get_source_segment(text, node)
    assert len(text.splitlines()) == pytest.approx(int(lines), abs=20) and len(STOPS) == 5


def function_of(module, name):
    [path] = [path for path in (ROOT, ROOT / "family", ROOT / "judges")
              if (path / f"{module}.py").exists()]
    place = "" if path == ROOT else f"{path.name}."
    return getattr(importlib.import_module(place + module), name)


def test_a_function_that_a_page_names_is_there_and_an_equation_has_its_test():
    files = [path for room in (".", "family", "judges") for path in (ROOT / room).glob("*.py")]
    known = {path.stem for path in files} - {"rollout"}  # options of verl begin with it, too
    proved = set()
    for page in [*PAGES, *ROOT.glob("docs/zh/*.md")]:
        for line in page.read_text().splitlines():
            names = {(module, name) for module, name in re.findall(r"`(\w+)\.(\w+)`", line)
                     if module in known and name not in ("py", "jsonl")}
            assert all(function_of(*pair) for pair in names)
            tests = [page.parent / path for path in re.findall(r"\(([^\s()]*test_\w+\.py)\)", line)]
            if line.startswith("|") and tests:
                text = "".join(path.read_text() for path in tests)
                assert all(name in text for _, name in names), line
                proved |= names
    assert len(proved) >= 30


# --- links ---


def anchors(path):
    """The places in a file that a link may name: what it names itself, and GitHub's names of the
    headings of a page."""
    text = path.read_text()
    named = re.findall(r'<a id=\\?"([\w-]+)\\?">', text)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return named + [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                    for heading in headings]


def text_of(page):
    """A page without its code."""
    text = page.read_text()
    if page.suffix != ".ipynb":
        return FENCED.sub("", text)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https://)([^)\s]*)\)", text_of(page)):
        name, _, anchor = link.removesuffix("#lang=zh").partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists() and path.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(path), link


def test_the_start_page_links_every_page_of_docs_and_some_page_shows_every_picture():
    pages = {path.name for path in ROOT.glob("docs/*.*") if path.suffix in (".md", ".html")}
    assert all(f"]({name})" in START for name in pages - {"README.md", "index.html"})
    text = "".join(page.read_text() for page in [*PAGES, *ROOM.glob("*.md")])
    shown = set(re.findall(r"\]\((?:\.\./experiments/results/)?([\w-]+\.png)\)", text))
    assert {picture.name for picture in ROOM.glob("*.png")} <= shown


# --- the metrics of a run ---


@pytest.fixture(scope="module")
def ran(small, tmp_path_factory):
    """The folder of a run of one step of PPO, which writes all metrics."""
    folder = tmp_path_factory.mktemp("ran")
    words = "--algorithm ppo --group_size 8 --eval_questions 1 --hooks examples/my_metrics.py"
    one_step(small, folder, *words.split())
    return folder


def explained(file):
    """{name: meaning} of all tables of a file of a run."""
    tables = [table for title, table in MEANINGS.items() if title.split(",")[0] == file]
    return {name: meaning for table in tables for name, meaning in table.items()}


def test_every_number_of_a_run_is_explained(ran):
    *_, metrics = map(json.loads, (ran / "metrics.jsonl").read_text().splitlines())
    found = {re.sub("(?<=^custom/).*|toy_accuracy", "NAME", name) for name in metrics}
    of_eval_every = {"eval_accuracy", "eval_reward", "eval_length"}
    assert found | of_eval_every == set(explained("metrics.jsonl"))
    [sample] = map(json.loads, (ran / "samples.jsonl").read_text().splitlines())
    assert set(sample) - {"step"} == set(explained("samples.jsonl"))
    summary, meanings = json_of(ran / "summary.json"), explained("summary.json")
    assert set(summary) == set(meanings)
    for name in {*summary["after"], *summary["after"]["greedy"]}:
        assert name in meanings["after"]
    for name in sample["completions"][0]:
        assert name in explained("samples.jsonl")["completions"]


# --- the slides ---


def results(table):
    return json_of(ROOT / f"experiments/results/{table}.json")["rows"]


TABLE1, CONTROLS, FACTORIAL, REAL = map(results, ("table1", "controls", "factorial", "real"))
REAL = by_name(REAL)
TIMES = [times for _, times, *_ in speedups.bars()]


def test_the_slides_figures_were_measured():
    stored = "".join(page.read_text() for page in ROOM.glob("[!R]*.md"))
    figures = re.findall(r"\d+\.\d+ ± \d+\.\d+", (ROOT / "docs/slides.md").read_text())
    assert len(figures) > 15 and all(figure in stored for figure in figures)


def test_the_answers_of_the_lab_are_what_it_stores():
    """All but the bound that a student calculates."""
    lab = (ROOT / "notebooks/lab.ipynb").read_text()
    answers = (ROOT / "docs/teaching.md").read_text().split("## The lab")[1].split("\n## ")[0]
    figures = re.findall(r"\d+\.\d+", answers)
    figures.remove("1.75")
    assert figures and all(f" {figure}" in lab for figure in figures)


def test_the_first_screen_of_the_results_says_what_the_tables_say():
    """Nine findings, each with one number."""
    *_, toy, fair, _, _, prompts, _, answers = TIMES
    failed = sum(accuracy < 0.5 for accuracy in FACTORIAL[1]["sampled"]["values"])

    def ahead(one, other, key="sampled", digits=2):
        return f"{one[key]['mean'] - other[key]['mean']:.{digits}f}"

    numbers = [
        f"{toy:.1f} times", ahead(TABLE1[0], TABLE1[3]), f"{fair:.1f} times",
        f"{1 / answers:.1f} times", ahead(CONTROLS[1], CONTROLS[6]), f"{failed} of 5",
        ahead(REAL["CPPO, P=0.75"], REAL["GRPO"], "sampled 240"),
        f"{by_name(results('learning_cpu'))['CPPO, P=0.875']['end']['mean']:.2f}",
        f"{prompts:.1f} times",
    ]
    first, *_ = (ROOT / "docs/results.md").read_text().split("\n## ")
    again = by_name(results("real_second"))
    repeat = ahead(again["CPPO, P=0.75"], again["GRPO"], "sampled 240", digits=3)
    assert f"In a repeat it led by {repeat}," in first
    assert re.findall(r"^- .* \*\*([\d.].*)\*\* ", first, re.MULTILINE) == numbers


def test_the_readme_says_the_numbers_of_its_picture():
    found = README.split("Should you use CPPO?")[1].split("## Find")[0]
    said = [TIMES[5], TIMES[6], 1 / TIMES[11]]
    assert re.findall(r"([\d.]+) times", found) == [f"{times:.1f}" for times in said]
