"""The house: imports go one way, and there is no circle. The imports inside functions count,
too."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ["base", "model", "tasks", "scoring", "run"]  # each knows itself and those before it
PAPER = ["grpo", "cppo", "allocate", "micro_batches", "rewards"]
FILES = [
    path.relative_to(ROOT)
    for folder in (".", "family", "engine/*") for path in sorted(ROOT.glob(f"{folder}/*.py"))]
MODULES = {".".join(path.with_suffix("").parts): path for path in FILES}


def imports(path):
    """The modules of this project that a file imports."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & set(MODULES)


GRAPH = {name: imports(path) for name, path in MODULES.items()}


def test_a_room_knows_only_the_rooms_before_it_and_not_the_loop():
    for name, others in GRAPH.items():
        if name.startswith("engine."):
            room = ROOMS.index(name.split(".")[1])
            later = [other for other in others if other.startswith("engine.")
                     and ROOMS.index(other.split(".")[1]) > room]
            later += others & {"train", "rollout", "update", "records", "eval"}
            assert not later, f"{name} imports {later}"


def test_the_paper_the_family_and_the_table_do_not_know_the_machine():
    for name, others in GRAPH.items():
        if name in PAPER or name.startswith("family."):
            assert others <= {"grpo"}, name
    assert not [other for other in GRAPH["algorithms"] if other.startswith("engine.")]


def test_there_is_no_circle():
    left = dict(GRAPH)
    while done := [name for name, others in left.items() if not others & set(left)]:
        left = {name: others for name, others in left.items() if name not in done}
    assert not left, f"these import each other: {', '.join(left)}"
