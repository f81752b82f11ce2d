"""What a package index, a citation and an editable install read: pyproject.toml says the same as
the two files of requirements, CITATION.cff and the files themselves."""

import re
import tomllib

import yaml
from packaging.requirements import Requirement

from tests.helpers.runs import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def ranges(lines):
    """{package: its versions} of lines like numpy>=1.26."""
    return {r.name: r.specifier for r in map(Requirement, lines)}


def required(name):
    return ranges((ROOT / name).read_text().splitlines())


def test_the_project_needs_what_requirements_txt_installs():
    pinned = required("requirements.txt")
    needed = ranges(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["train"])
    [torch] = pinned.pop("torch")  # requirements.txt pins it, and the project takes a range
    assert torch.operator == "==" and torch.version in needed.pop("torch")
    assert needed == pinned
    assert ranges(PYPROJECT["dependency-groups"]["dev"]) == required("requirements-dev.txt")


def test_a_wheel_holds_what_people_copy_and_all_of_it():
    """Nobody installs a training script. What it holds imports nothing that it lacks."""
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages, modules = setuptools["packages"], setuptools["py-modules"]
    assert modules == ["allocate", "cppo", "grpo", "rewards", "scores"]
    rooms = {name.split(".")[0] for name in packages}
    assert rooms == {"answers", "conformance", "family", "judges"}
    files = [ROOT / f"{module}.py" for module in modules]
    for room in sorted(rooms):
        files += (ROOT / room).rglob("*.py")
    files.remove(ROOT / "family/diffs/build.py")  # the wheel has no nano.py to patch
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in files} - {""}
    tests = {f"conformance.tests{room}" for room in ("", ".concepts", ".helpers")}
    assert folders | tests == set(packages)
    trains = {"algorithms", "engine", "eval", "experiments", "nano", "tasks", "train", "update"}
    for path in files:
        found = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not set(found) & trains, path


def test_the_citation_names_this_version_and_its_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    [author] = citation["authors"]
    assert [author] == PROJECT["authors"] and author["name"] in (ROOT / "LICENSE").read_text()
