"""Puts docs/step.html together: the equations of book.md, each with the line that computes it (quoted
from the file itself), the page's style and JavaScript, and the numbers that stand in it already.

    python docs/step/build.py            to renew the numbers: python experiments/microscope.py
"""

import argparse
import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = HERE.parent / "step.html"
CHINESE = {
    "measured": "实测", "test": "测试", "rewards": "奖励", "nano.py has no such line": "nano.py 没有这一行",
}


def rows():
    """Lists of book.md: the two names of a part, or the seven cells of an equation."""
    for line in (HERE / "book.md").read_text().splitlines():
        if line.startswith("## "):
            yield line.removeprefix("## ").split(" · ")
        elif re.match(r"\| (?!row )\w", line):
            yield [cell.replace(r"\|", "|") for cell in line.strip("| ").split(" | ")]


def quoted(place):
    """(file, function, the line with the comment above it) of "file: how the line begins"."""
    file, start = place.split(": ", 1)
    lines = (ROOT / file).read_text().splitlines()
    at, *others = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
    if others:
        raise ValueError(f"book.md: {file} has more than one line that begins with {start}")
    function = ""  # a line of no function begins at the left
    if lines[at].startswith(" "):
        function = [*re.findall(r"^def (\w+)", "\n".join(lines[:at]), re.MULTILINE)][-1]
    comment = [lines[at - 1].strip()] if lines[at - 1].strip().startswith("#") else []
    code = lines[at].strip() + ("…)" if lines[at].endswith("(") else "")
    return file, function, "\n".join([*comment, code])


def both(english, chinese=None):
    """Words in both languages, of which the page shows one."""
    words = {"en": english, "zh": chinese or CHINESE[english]}
    return "".join(f'<span lang="{lang}">{html.escape(text)}</span>' for lang, text in words.items())


def link(found):
    """A link of book.md as it leads from docs/."""
    words, address = found.groups()
    name = "test" if words.startswith("test_") else words
    address = address.removeprefix("../")
    return f'<a href="{address}">{both(name, CHINESE.get(name, name))}</a>'


def equation(key, paper, tex, english, chinese, place, more):
    """An equation, its line, and a place for its number, side by side."""
    file, function, code = quoted(place)
    formula = convert(tex.strip("$"), display="block").replace("<mi>log</mi>", "<mi>log</mi><mspace width='.15em' />")
    names = "".join(f"<code>{name}</code>" for name in re.findall("`(.+?)`", more))
    links = "".join(map(link, re.finditer(r"\[(.+?)\]\((.+?)\)", more)))
    none = "" if file == "nano.py" else f' · {both("nano.py has no such line")}'
    return f"""<article id="{key}">
<div class="equation"><p class="paper">{html.escape(paper)}</p>{formula}<p>{both(english, chinese)}</p></div>
<div class="line"><p class="paper">{file}{f" · {function}" if function else ""}{none}</p><code class="code">{html.escape(code)}</code><p class="more">{names}{links}</p></div>
<div class="number"><b></b><p></p></div>
</article>"""


def book():
    made = ""
    for row in rows():
        made += f"<h2>{both(*row)}</h2>\n" if len(row) == 2 else equation(*row) + "\n"
    return made


def page(earlier):
    """The text of the page. earlier: the page as it is, with the numbers that it keeps."""
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', earlier)[1]
    parts = {"book": book(), "data": data}
    for name in ("../live/grpo.js", "../live/cppo.js", "compute.js", "page.js", "page.css"):
        parts[name] = (HERE / name).read_text()
    text = (HERE / "page.html").read_text()
    return re.sub(r"\{\{(.+?)\}\}\n?", lambda found: parts[found[1]], text)


def main(argv):
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    PAGE.write_text(page(PAGE.read_text()))
    print("written: docs/step.html")


if __name__ == "__main__":
    main(sys.argv[1:])
