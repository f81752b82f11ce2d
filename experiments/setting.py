"""Where and with what a table was measured: the lines above it."""

import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]  # the project's


def processor():
    """The processor's name, as Linux or else as Python knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def setting(packages):
    """Date, command, versions and processor of this run."""
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "processor": processor(),
    }


def heading(title, where):
    """The first lines of a results page."""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return f"# {title}\n\n`{where['command']}`\n\n{where['date']}, {where['processor']}, {versions}.\n"
