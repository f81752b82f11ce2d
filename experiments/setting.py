"""The two files of a measurement, and their first lines: where, when and with what it was made."""

import json
import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]  # the project's


def processor():
    """The processor's name, from Linux if possible, otherwise from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def setting(packages):
    """Date, command, versions and processor of this run."""
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages},
        "processor": processor(),
    }


def heading(title, where):
    """The first lines of a results page."""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return (
        f"# {title}\n\n`{where['command']}`\n\n{where['date']}, {where['processor']}, {versions}.\n"
    )


def markdown_table(lines):
    """Lines of cells as a Markdown table; the first line is its head. A | within a cell, as in |A|,
    is escaped."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def write(folder, name, result, page):
    """`result` as NAME.json and `page`, Markdown, as NAME.md in a folder, which is made if it is
    not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
