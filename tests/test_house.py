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


def test_a_room_knows_only_the_rooms_before_it():
    for name, others in GRAPH.items():
        for other in others if name.startswith("engine.") else ():
            if other.startswith("engine."):
                room, known = (ROOMS.index(module.split(".")[1]) for module in (name, other))
                assert known <= room, f"{name} imports {other}"


def test_the_paper_the_family_and_the_table_do_not_know_the_machine():
    for name, others in GRAPH.items():
        if name in [*PAPER, "algorithms"] or name.startswith("family."):
            assert not [other for other in others if other.startswith("engine.")], name
        if name in PAPER or name.startswith("family."):
            assert others <= {"grpo"}, name


def test_the_machine_does_not_know_the_loop():
    loop = {"train", "rollout", "update", "records", "eval"}
    for name, others in GRAPH.items():
        assert not (name.startswith("engine.") and others & loop), name


def test_there_is_no_circle():
    left = dict(GRAPH)
    while done := [name for name, others in left.items() if not others & set(left)]:
        for name in done:
            del left[name]
    assert not left, f"these import each other: {', '.join(left)}"
