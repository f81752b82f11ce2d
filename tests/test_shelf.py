"""What a package index, a citation and an editable install read: pyproject.toml says the same as
requirements.txt, CITATION.cff, CHANGELOG.md and the files themselves."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def ranges(lines):
    """{package: its versions} of lines like numpy>=1.26."""
    return {r.name: r.specifier for r in map(Requirement, lines)}


def test_the_project_needs_what_requirements_txt_installs():
    pinned = ranges((ROOT / "requirements.txt").read_text().splitlines())
    needed = ranges(PROJECT["dependencies"] + PYPROJECT["dependency-groups"]["dev"])
    [torch] = pinned.pop("torch")  # requirements.txt pins it, and the project takes a range
    assert torch.operator == "==" and torch.version in needed.pop("torch")
    assert needed == pinned


def test_an_editable_install_finds_every_module():
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert setuptools["py-modules"] == sorted(path.stem for path in ROOT.glob("*.py"))
    folders = {path.parent for path in ROOT.glob("[a-z]*/**/*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    ours = {name for name in packages if name.split(".")[0] in setuptools["packages"]}
    tests = {"conformance.tests", "conformance.tests.concepts"}
    assert set(setuptools["packages"]) == ours | tests


def test_the_citation_and_the_changes_name_this_version_and_its_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    [author] = citation["authors"]
    assert [author] == PROJECT["authors"] and author["name"] in (ROOT / "LICENSE").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == PROJECT["version"]
