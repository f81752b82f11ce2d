"""Puts docs/live.html together: the page, its style, all JavaScript and the weights, in one file.

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
PAGE = HERE.parent / "live.html"
BASE = HERE.parents[1] / "tasks" / "toy_base" / "model.safetensors"
WORKER = ["model", "sampling", "grpo", "cppo", "adamw", "toy", "step", "worker"]
SEEN = ["page.css", "earlier.json", "chinese.json", "words.js", "drawing.js", "page.js"]
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


def page():
    """The text of docs/live.html."""
    parts = {name: (HERE / name).read_text() for name in SEEN}
    parts["worker"] = "\n".join((HERE / f"{name}.js").read_text() for name in WORKER)
    parts["weights"] = weights()
    text = (HERE / "page.html").read_text()
    return re.sub(r"\{\{(.+?)\}\}\n?", lambda found: parts[found[1]], text)


def main(argv):
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    PAGE.write_text(page())
    print("written: docs/live.html")


if __name__ == "__main__":
    main(sys.argv[1:])
