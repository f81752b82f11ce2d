"""What tests of whole runs share: the project's folder, files of questions, runs of train.py in
this process, and what other processes need."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import train
from engine.base import files

ROOT = Path(__file__).parents[2]
# beside that of this process. Several ranks compute on the CPU, also beside a single GPU
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def python(*words, folder=ROOT, **more):
    """(exit code, all that is printed) of a program with these words, in this folder. more: of its
    environment."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=os.environ | ENVIRONMENT | more,
        capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def run(model, folder, words=""):
    """train.py on this model, into this folder, with these words of a command line. Returns its
    exit code."""
    return train.main(f"--model {model} --output_dir {folder} {words}".split())


def go_on(folder, words=""):
    """The run in this folder goes on. Returns the exit code."""
    return train.main(f"--output_dir {folder} --resume {words}".split())


def metrics_of(folder):
    """What each step of a run measured, but for the seconds."""
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in files.read_lines(folder / "metrics.jsonl")
    ]


def json_of(path):
    """What a JSON file holds."""
    return json.loads(path.read_text())


def written(path, rows):
    """The path of a new file of these rows, which train.py can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(files.as_lines(rows), encoding="utf-8")
    return path


def sums(count):
    """Rows of so many questions that the toy can read: 0+1=?, 1+1=?, …"""
    return [{"question": f"{i}+1=?", "answer": str(i + 1)} for i in range(count)]


def free_port():
    """A port of this machine that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
