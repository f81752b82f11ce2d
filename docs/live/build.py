"""Puts docs/live.html and docs/you.html together: each page, its style, all JavaScript and the
weights, in one file.

    python docs/live/build.py

A browser opens the file without a server, so nothing may be loaded: a worker starts from the text
of WORKER, and the weights of the toy's base model stand in the page as float16 in base64.
"""

import argparse
import base64
import re
import sys
from pathlib import Path

from safetensors.torch import load_file

HERE = Path(__file__).parent
BASE = HERE.parents[1] / "tasks" / "toy_base" / "model.safetensors"
WORKER = ["model", "sampling", "grpo", "cppo", "adamw", "toy", "step"]
COLUMNS = 100


def tensors():
    """The names of the weights in the order of TENSORS in model.js."""
    code = (HERE / "model.js").read_text()
    layer = re.search(r"LAYER_TENSORS = \[\n(.+?)\n\];", code, re.DOTALL)[1]
    names = re.findall(r'\["([\w.]+)"', layer)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in names]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight"]


def weights():
    """All weights one after the other, float16, little-endian, in base64, as lines."""
    of = load_file(BASE)
    names = tensors()
    if sorted(names) != sorted(of):
        raise ValueError("model.js names other tensors than the base model has")
    flat = b"".join(of[name].half().numpy().astype("<f2").tobytes() for name in names)
    text = base64.b64encode(flat).decode()
    return "\n".join(text[i : i + COLUMNS] for i in range(0, len(text), COLUMNS))


def page(name):
    """The text of a page of docs. Its parts stand in its own folder or in docs/live."""
    worker = "\n".join((HERE / f"{part}.js").read_text() for part in WORKER)
    worker += "\n" + (HERE.parent / name / "worker.js").read_text()
    made = {"worker": worker, "weights": weights()}

    def part(found):
        own, shared = HERE.parent / name / found[1], HERE / found[1]
        return made.get(found[1]) or (own if own.exists() else shared).read_text()

    text = (HERE.parent / name / "page.html").read_text()
    return re.sub(r"\{\{(.+?)\}\}\n?", part, text)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    for name in ("live", "you"):
        (HERE.parent / f"{name}.html").write_text(page(name))
        print(f"written: docs/{name}.html")


if __name__ == "__main__":
    main(sys.argv[1:])
