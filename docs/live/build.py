"""Puts docs/live.html and docs/you.html together: each page, its style, all JavaScript and the
weights, in one file.

    python docs/live/build.py

A browser opens the file without a server, so nothing may be loaded: a worker starts from a text in
the page, and the weights of the toy's base model stand in the page as float16 in base64.
"""

import base64
import re
import sys
import textwrap
from pathlib import Path

from safetensors.torch import load_file

DOCS = Path(__file__).parents[1]
BASE = DOCS.parent / "tasks/toy_base/model.safetensors"


def weights():
    """All weights one after the other, float16, in base64, in the order of TENSORS in model.js."""
    code = (DOCS / "live/model.js").read_text()
    *layer, first, last = re.findall(r'\["([\w.]+)", \[', code)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in layer]
    names, of = [first, *layers, last], load_file(BASE)
    assert sorted(names) == sorted(of), "model.js names other tensors than the base model has"
    flat = b"".join(of[name].half().numpy().astype("<f2").tobytes() for name in names)
    return textwrap.fill(base64.b64encode(flat).decode(), 100)


def page(name):
    """The text of a page. Each of its parts {{file}} stands in its own folder or in docs/live."""
    def part(found):
        own = DOCS / name / found[1]
        return (own if own.exists() else DOCS / "live" / found[1]).read_text()

    text = (DOCS / name / "page.html").read_text().replace("{{weights}}", weights())
    return re.sub(r"\{\{(.+?)\}\}\n?", part, text)


if __name__ == "__main__":
    if sys.argv[1:]:  # --help
        print(__doc__)
    else:
        for name in ("live", "you"):
            (DOCS / f"{name}.html").write_text(page(name))
            print(f"written: docs/{name}.html")
