"""README and docs/ tell the truth: commands, options, links, names, line counts, metrics."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

import eval as evaluation
from engine.run.config import Config, fill_in
from engine.run.options import option_fields, parse
from engine.scoring.score import choose
from tests.training import one_step

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TORCHRUN = {
    "--nnodes", "--nproc-per-node", "--max-restarts",
    *(f"--rdzv-{name}" for name in ("backend", "endpoint", "id", "conf")),
}
FOREIGN = TORCHRUN | {"--logdir", "--local-dir"}  # tensorboard's, hf's

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_readme_has_at_most_160_lines():
    assert len(README.splitlines()) <= 160


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
    # its gradient is the policy gradient: −A/(N|o|) (onehot − softmax) at each token, N = 4
    # completions of 5 tokens
    gradient, model = torch.zeros(9, 9), names["model"].weight.detach()
    for row, a in zip([0, 1, 4, 7], advantages):
        tokens = names["tokens"][row].tolist()
        for before, token in zip(tokens, tokens[1:]):
            gradient[before] += a / 20 * model[before].softmax(0)
            gradient[before, token] -= a / 20
    assert torch.allclose(names["model"].weight.grad, gradient, atol=1e-4)


# --- names and numbers ---


STOPS = re.findall(
    r"^\| \d \| \[([\w.]+)\]\([\w.]+\)(?:, `(\w+)`)? \| (\d+) \|", README, re.MULTILINE
)


def test_there_are_six_stops():
    assert len(STOPS) == 6


@pytest.mark.parametrize("file, function, lines", STOPS)
def test_a_stop_has_as_many_lines_as_the_readme_says(file, function, lines):
    text = (ROOT / file).read_text()
    count = len(text.splitlines())
    if function:
        [node] = [node for node in ast.parse(text).body if getattr(node, "name", None) == function]
        count = node.end_lineno - node.lineno + 1
    assert count == int(lines), f"{file} {function} has {count} lines: say so in the README"


def equations():
    """(module, function, files of its tests) of each function in a table of equations."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            tests = [page.parent / path for path in re.findall(r"\((\S*test_\w+\.py)\)", line)]
            names = re.findall(r"`(\w+)\.(\w+)`", line) if line.startswith("|") and tests else []
            yield from ((module, name, tests) for module, name in names)


@pytest.mark.parametrize("module, name, tests", list(equations()), ids=lambda x: x if isinstance(x, str) else "")
def test_an_equation_has_its_function_and_its_test(module, name, tests):
    module = module if (ROOT / f"{module}.py").exists() else f"family.{module}"
    assert callable(getattr(importlib.import_module(module), name))
    assert any(name in path.read_text() for path in tests)


def test_there_are_the_equations_of_grpo_cppo_and_the_family():
    assert len({(module, name) for module, name, _ in equations()}) >= 30


# --- links ---


def anchors(path):
    """The places in a file that a link may name: GitHub's names of the headings; in a notebook,
    what its cells name."""
    if path.suffix == ".ipynb":
        return re.findall(r'<a id=\\"(\w+)\\">', path.read_text())
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pages
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]*)\)", FENCED.sub("", page.read_text()))
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists() and path.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(path), link


def test_readme_links_every_page_of_docs_and_docs_show_every_picture():
    assert all(f"](docs/{page.name}" in README for page in PAGES[1:])
    text = "".join(page.read_text() for page in PAGES)
    assert all(
        f"results/{picture.name})" in text for picture in ROOT.glob("experiments/results/*.png")
    )


# --- commands and options ---


def code(page):
    """Lines of code blocks, fenced or indented."""
    text = page.read_text()
    return [line.strip() for line in text.splitlines() if line.startswith("    ")] + [
        line.strip() for _, block in FENCED.findall(text) for line in block.splitlines()]


def inline(page):
    return [
        " ".join(words.split())
        for words in re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text()))
    ]


def options_of(program):
    """Names of the options of a program, read from its source: `name: type = option(…)`, or an
    argument of argparse."""
    if program == "train.py":
        return {f.name for f in option_fields(Config)}
    names = set()
    for node in ast.walk(ast.parse((ROOT / program).read_text())):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") == "option"
        ):
            names.add(node.target.id)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names.add(node.args[0].value.removeprefix("--"))
    return names


def command(line):
    """(program, its words) of a line that begins with python or torchrun."""
    words = shlex.split(line, comments=True)[1:]
    while words[0] in TORCHRUN:  # each has one value
        words = words[2:]
    return words[0], words[1:]


def takes(words):
    """train.py takes these options, its recipe and its files of functions."""
    config, _ = fill_in(parse(Config, words))
    choose(config.data.rewards)


COMMANDS = sorted(
    {line for page in PAGES for line in code(page) if re.match(r"(python|torchrun) ", line)}
)


def test_there_are_commands():
    assert len(COMMANDS) > 25


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_files_and_options_that_there_are(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, words = command(line)
    if program == "-c":  # its imports, at least
        [statement, *_] = ast.parse(words[0]).body
        assert all(
            hasattr(importlib.import_module(statement.module), name.name)
            for name in statement.names
        )
        return
    assert (ROOT / program).is_file()
    assert {word[2:].split("=")[0] for word in words if word.startswith("--")} <= options_of(
        program
    ) | {"help"}
    if program == "eval.py":
        parse(evaluation.Config, words)
    if program == "train.py" and "--help" not in words:
        takes(words)


@pages
def test_options_and_commands_in_the_text_are_those_of_a_program(page):
    programs = [
        "train.py", "eval.py",
        *(f"experiments/{path.name}" for path in ROOT.glob("experiments/*.py")),
    ]
    known = (
        {f"--{name}" for program in programs for name in options_of(program)} | {"--help"} | FOREIGN
    )
    assert set(re.findall(r"--[a-z][\w-]*", FENCED.sub("", page.read_text()))) <= known
    for line in inline(page) + code(page):
        if re.match(r"(python |torchrun |pytest |[\w/]+\.py --)", line):
            files = re.findall(r"[\w./]+\.(?:py|yaml)\b", line.split("#")[0])
            assert all((ROOT / file).is_file() for file in files), line


def test_options_of_the_examples_in_the_text_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [
        line
        for page in PAGES
        for line in inline(page)
        if re.match(r"--(keep|rewards) .*\.py:\w", line)
    ]
    lines = [line for line in lines if "FILE.py" not in line]
    assert len(lines) == 3
    for line in lines:
        takes(shlex.split(line))


# --- the metrics of a run ---


def test_every_metric_is_documented_and_every_documented_metric_is_written(small, tmp_path):
    metrics = one_step(
        small, tmp_path, "--algorithm", "ppo", "--group_size", "8", "--eval_questions", "1"
    )
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs/metrics.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    documented = [
        name.replace("NAME", "toy_accuracy")
        for row in rows
        for name in re.findall(r"`([^`]+)`", row)
    ]
    assert len(documented) == len(set(documented)) and set(documented) == set(metrics)
