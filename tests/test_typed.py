"""What the pages and the docstrings tell a reader to type works: each command is given to the
parser of its program. Nothing is trained here, so this also holds for commands that need a GPU.
"""

import ast
import importlib
import json
import re
import runpy
import shlex
import sys
import textwrap
from argparse import ArgumentError, ArgumentParser
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.run import get_args_parser

import eval as evaluation
import train
from algorithms import ALGORITHMS, KEEP
from engine.base.errors import UserError
from engine.base.files import builtin_or_custom
from engine.data.rows import check_dataset
from engine.options.command_line import flat, parse, parse_given
from engine.options.config import Config, config_of
from engine.scoring.score import load_rewards
from tests.helpers.runs import ROOT

START = r"(\$ )?(python|torchrun|pytest|pip|bash) \S|pytest$|for .*; do "
# programs of others: only their files are looked at
FOREIGN = {"bash", "cd", "cp", "done", "export", "for", "git", "grep", "head", "hf", "jupyter",
           "mkdir", "node", "npx", "patch", "pip"}  # fmt: skip
FOREIGN_MODULES = {"verl.trainer.main_ppo"}
# words that stand for something of the reader's, and what stands for them here
PLACEHOLDERS = {
    "S": "1", "NAME": "cppo", "NAME:WEIGHT": "toy_accuracy",
    "questions.jsonl": "examples/my_dataset.jsonl",
    **dict.fromkeys(["FILE.py:…", "FILE.py:FUNCTION"], "examples/my_reward.py:brevity"),
    "runs/mine.py:keep": "examples/my_rule.py:per_token",
}  # fmt: skip
MINE = re.compile(r"(^|[/_])mine\b|^MINE|^FILE")  # a file of the reader's


# --- where a reader finds something to type ---


def docstrings(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = ast.walk(ast.parse(path.read_text()))
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]


def text_of(path):
    """What a reader reads in a file: a page whole; of a program its docstrings, of a recipe and a
    script their comments."""
    text = path.read_text()
    if path.suffix == ".py":
        return "\n\n".join(docstrings(path))
    if path.suffix in (".yaml", ".sh"):
        return "\n".join(line.replace("#", " ", 1) for line in text.splitlines() if line[:1] == "#")
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        cells = [re.sub(r"^%%bash\n(.*)", r"```\n\1\n```\n", source) for kind, source in cells
                 if kind == "markdown" or source.startswith("%%bash")]
        return "\n\n".join(cells)
    return text


PAGES = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md"]
PAGES += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/**/*.md")]
PAGES += [ROOT / f"experiments/results/{name}.md" for name in ("README", "browser", "left_out")]
FOLDERS = ["conformance", "docs", "engine", "examples", "experiments", "family",
           "notebooks", "recipes", "tasks", "tests", "tools"]  # fmt: skip
FILES = [*PAGES, *ROOT.glob("*.py")] + [
    path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*")
    if path.suffix in (".py", ".yaml", ".sh") and "mine" not in path.parts]
FILES += [ROOT / "notebooks/lab.ipynb"]
TEXTS = {str(path.relative_to(ROOT)): text_of(path) for path in sorted(FILES)}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def lines_of(block):
    """The lines of a block; a line that ends in a backslash and the next one are one line."""
    return [line for line in re.sub(r"(?<=\S) *\\\n\s*", " ", block).splitlines() if line.strip()]


def explained(line):
    """A line without its explanation, which follows after two spaces or more."""
    return re.sub(r"(?<=\S)\s{2,}(?!--)\S.*", "", line).rstrip()


def commands_of(block):
    """The commands of a block; none if no line begins like one. In a block with `$ ` the other
    lines are what is printed. In a block without, every line must be a command or a comment; but
    an explanation may go on in the next line, below its beginning."""
    lines = lines_of(block)
    started = [line.strip() for line in lines if re.match(START, line.strip())]
    if any(line.startswith("$ ") for line in started):
        lines = started
    elif started:
        lines = [line for line in lines if line[:9].strip() and line[0] != "#"]
    else:
        return []
    return [explained(line.removeprefix("$ ")) for line in lines]


def collect(text):
    """The commands of a text. Options that stand alone are train.py's, if it knows them."""
    rest = FENCED.sub("", text) + "\n"
    blocks = [textwrap.dedent(block) for block in INDENTED.findall(rest)]
    blocks += [block for _, block in FENCED.findall(text)]
    commands = [command for block in blocks for command in commands_of(block)]
    for words in INLINE.findall(INDENTED.sub("", rest)):
        words = " ".join(words.split())
        if re.fullmatch(r"python (-m )?\S+", words):  # names a program, perhaps without its words
            commands.append(f"{words} …")
        elif re.match(START, words):
            commands.append(words)
        elif re.match(r"[\w/]+\.py -", words):
            commands.append(f"python {words}")
        elif re.match("--[a-z].* ", words) and words.split()[0][2:] in flat(Config()):
            commands.append(f"python train.py {words} …")
    return commands


# {what is typed: the last file that says it}
COMMANDS = {command: name for name, text in TEXTS.items() for command in collect(text)}


# --- commands ---


class Found(Exception):
    """Carries the parser of a program."""


def stop(parser, *words, **options):
    raise Found(parser)


@cache
def parser_of(program):
    """The parser of a program: the one that its `main` asks first. None if it has none."""
    source = (ROOT / program).read_text()
    assert "\nif __name__ == " in source, f"{program} is no program"
    if not re.search(r"ArgumentParser\(|[ (](parse|given|open_run)\(", source):
        return None
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    with patch.object(ArgumentParser, "parse_known_args", stop):
        try:
            module.main([])
        except Found as found:
            return found.args[0]


def check_train(words):
    """A run with these options would begin."""
    chosen = parse_given(Config, words)
    if not chosen.get("resume"):  # there is no such run here
        config_of(chosen)


def check_names(options):
    """What options of train.py name is there."""
    assert options.algorithm in ALGORITHMS
    if options.keep is not None:
        builtin_or_custom(options.keep, KEEP, "rule", "--keep")
    load_rewards(options.rewards or ())
    check_dataset(options.dataset)


def check_program(program, words):
    """The words of a command line, as the program reads them. … stands for words left out."""
    whole, words = "…" not in words, [word for word in words if word != "…"]
    if program == "train.py" and whole:
        check_train(words)
    elif program == "train.py":
        check_names(parse(Config, words).options)
    elif program == "eval.py":
        evaluation.check(parse_given(evaluation.EvaluationOptions, words))
    elif program.startswith("examples/my_"):  # adds to a table, and calls train.main
        with patch.object(train, "main", check_train), patch.object(sys, "argv", ["", *words]):
            with patch.dict(ALGORITHMS):
                runpy.run_path(program, run_name="__main__")
    elif parser_of(program) is None:
        assert not [word for word in words if word[0] == "-"], f"{program} takes no options"
    elif whole or words:
        parser_of(program).parse_args(words)


def check_files(words):
    """What looks like a file of the project is one."""
    for word in words:
        name = word.split("=")[-1].split(":")[0]
        if re.match(rf"({'|'.join(FOLDERS)})/", name) or re.search(r"\.(py|sh|txt|yaml)$", name):
            assert MINE.search(name) or any(ROOT.glob(name)), f"{name} does not exist"


def split(line):
    """The words of each command of a line: `python train.py | head -1` has two."""
    line = re.sub(r"\$(\(+[^()]*\)+|\w+)", "1", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands = [[]]
    for word in lexer:
        if word and set(word) <= set("|&;"):
            commands.append([])
        elif word != "do":
            commands[-1].append(PLACEHOLDERS.get(word, word))
    return [words for words in commands if words]


def check_command(line, pytest_parser):
    for first, *words in split(line):
        check_files(words)
        if first == "torchrun":
            named = any(word.endswith(".py") for word in words)
            options = get_args_parser().parse_args(words if named else [*words, "train.py", "…"])
            check_program(options.training_script, options.training_script_args)
        elif words[:1] == ["-c"]:
            exec(words[1], {}) if first == "python" else check_command(words[1], pytest_parser)
        elif first == "python" and words[0] == "-m":
            if words[1] not in FOREIGN_MODULES:
                name = words[1].replace(".", "/")
                file = f"{name}/__main__.py" if Path(name).is_dir() else f"{name}.py"
                check_program(file, words[2:])
        elif first == "python":
            check_program(words[0], words[1:])
        elif first == "pytest":
            if "-n" in words:
                pytest.importorskip("xdist", reason="pip install -r requirements-dev.txt")
            unknown = pytest_parser.parse_known_and_unknown_args(words)[1]
            assert not unknown, f"pytest does not know {unknown}"
        else:
            assert first in FOREIGN or Path(first).is_file(), f"{first} is no command"


def problem(check, *arguments):
    """What is wrong, in one sentence; "" if nothing is."""
    try:
        check(*arguments)
    except SystemExit as end:
        return f"exit code {end.code}" if end.code else ""
    except (ArgumentError, AssertionError, AttributeError, OSError, SyntaxError, TypeError,
            UserError, ValueError) as error:  # fmt: skip
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_works(line, pytestconfig):
    why = problem(check_command, line, pytestconfig._parser)
    assert not why, COMMANDS[line]
