"""Builds the site: the pages to play with, the notebooks and all other pages, as HTML. It loads
nothing from a network: formulas become MathML.

    python docs/publish.py FOLDER

A link to a page leads to its HTML, and a picture is copied. Any other link leads to a file of the
project: on GitHub if GITHUB_REPOSITORY (OWNER/NAME) is set, as .github/workflows/pages.yml does,
and otherwise to the file on this disk.
"""

import argparse
import html
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
FIRST = "docs/you.html"  # the site's first page
CHINESE = "docs/zh/home.md"  # README.md in Chinese

# the line at the top of every page: {language: {what it says: where it leads}}
BARS = {
    "en": {
        "play": FIRST, "learn": "docs/README.md#learn", "believe": "docs/README.md#believe",
        "use": "docs/README.md#use", "compare": "docs/README.md#compare",
        "teach": "docs/README.md#teach", "code": ".",
    },
    "zh": {
        "体验": f"{FIRST}#lang=zh", "学习": "docs/zh/README.md#学习",
        "验证": "docs/zh/README.md#验证", "使用": "docs/zh/README.md#使用",
        "对比": "docs/zh/README.md#对比", "教学": "docs/zh/README.md#教学",
        "代码": ".",
    },
}  # fmt: skip
BAR_STYLE = """<style>
.bar { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 8px; font-size: 15px; }
.bar a { color: inherit; }
:root[lang=zh] .bar[lang=en], :root:not([lang=zh]) .bar[lang=zh] { display: none; }
</style>
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --line: #d6dbe1; --paper: #fff; --tint: #f3f5f7; --link: #1d4f8f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --line: #3b4551; --paper: #11151a; --tint: #1a2027; --link: #7db3f5; }
  .output_png img { background: #fff; }
}
body { margin: 0 auto; padding: 20px 20px 60px; max-width: 940px; background: var(--paper); color: var(--ink);
       font: 16px/1.55 "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 1.8em; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
img { max-width: 100%; }
code { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre code { font: inherit; }
:not(pre) > code { padding: 1px 4px; border-radius: 4px; background: var(--tint); }
pre, .highlight { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
                  background: var(--tint); }
pre { margin: 12px 0; padding: 10px 14px; border-radius: 6px; overflow-x: auto; }
table { display: block; border-collapse: collapse; overflow-x: auto; }
table + table { margin-top: 1em; }
th, td { padding: 4px 10px; border: 1px solid var(--line); text-align: left; }
summary { cursor: pointer; color: var(--link); }
hr { border: 0; border-top: 1px solid var(--line); }
.prompt { display: none; }
math { font-size: 1.08em; }
.wide { display: inline-block; max-width: 100%; overflow: auto hidden; vertical-align: middle; }
.formula { display: block; margin: 1em 0; overflow-x: auto; overflow-y: hidden; }
"""  # noqa: E501
PAGE = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def pages():
    """{a page of the project: its file in the site}. What is in docs/ comes to the site's root."""
    found = {"README.md": "readme.html"}
    patterns = ("docs/*.md", "docs/zh/*.md", "docs/*.html", "notebooks/*.ipynb")
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source = path.relative_to(ROOT).as_posix()
        place = source.removeprefix("docs/").replace("README", "pages")
        found[source] = str(Path(place).with_suffix(".html"))
    return found


PAGES = pages()


# --- what a page says ---


def text_of(source):
    """The whole text of a page, before its links are changed."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".html"):
        return text
    if source.endswith(".ipynb"):
        exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True)
        body, _ = exporter.from_filename(ROOT / source)
    else:
        body = from_markdown(text)
    return PAGE.format(
        lang="zh" if is_chinese(source) else "en",
        title=re.search(r"<h1[^>]*>([^<]*)", body)[1],
        style=colours_of_code() + STYLE,
        body=FORMULAS.sub(formula, body),
    )


# code, which stays as it is; $$a formula$$; $a formula$. In "$18, not $20" there is none
FORMULAS = re.compile(
    r"<(pre|code)\b.*?</\1>|\$\$([^$<]+)\$\$|(?<!\w)\$(?!\s)([^$<]+)(?<!\s)\$(?!\w)", re.DOTALL
)


def formula(found):
    """MathML in place of TeX."""
    _, block, inline = found.groups()
    if not (block or inline):
        return found[0]
    display = "block" if block else "inline"
    made = convert(html.unescape(block or inline), display=display)
    made = made.replace("\\", "")  # it leaves the one of \_ in a text
    made = made.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em" />')
    if block:
        return f'<span class="formula">{made}</span>'
    return f'<span class="wide">{made}</span>' if len(inline) > 40 else made


def from_markdown(text):
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # the settings of the slides
    renderer = IPythonRenderer(escape=False, exclude_anchor_links=True)
    made = MarkdownWithMath(renderer=renderer).render(text)
    return re.sub(r"<h(\d)[^>]*>(.*?)</h\1>", named_heading, made)


def named_heading(found):
    """A heading with the name that GitHub gives it, because links use this name."""
    level, words = found.groups()
    plain = html.unescape(re.sub(r"<.*?>", "", words)).lower()
    name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
    return f'<h{level} id="{name}">{words}</h{level}>'


def colours_of_code():
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


# --- where its links lead ---


def is_chinese(source):
    return source.startswith("docs/zh/")


def other_language(source):
    """The same page in the other language. If there is none, the README."""
    if source == CHINESE:
        return "README.md"
    if is_chinese(source):
        return source.replace("zh/", "")
    twin = source.replace("docs/", "docs/zh/")
    return twin if is_chinese(twin) and twin in PAGES else CHINESE


def bar(source):
    """The line at the top of a page. A page of HTML has both languages, and its own switch."""
    top = relpath(".", dirname(source) or ".")
    made = ""
    for language, links in BARS.items():
        if source.endswith(".html"):
            own = links
        elif is_chinese(source) == (language == "zh"):
            own = links | {"English" if is_chinese(source) else "中文": other_language(source)}
        else:
            continue
        words = "".join(f'<a href="{top}/{page}">{name}</a>' for name, page in own.items())
        made += f'<nav class="bar" lang="{language}">{words}</nav>\n'
    return made


def address(link, source, folder):
    """Where a link of a page leads in the site. A picture is copied into it."""
    name, mark, anchor = link.partition("#")
    if not name or ":" in name:
        return link
    target = normpath(join(dirname(source), name))
    place = PAGES.get(target)
    if target.endswith((".png", ".webp")):
        place = target
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target, folder / place)
    if place:
        return relpath(place, dirname(PAGES[source]) or ".") + mark + anchor
    repository = os.environ.get("GITHUB_REPOSITORY")
    if repository is None:
        return (ROOT / target).as_uri()
    if target == ".":
        return f"https://github.com/{repository}"
    if target.startswith("../"):  # of the repository on GitHub, as its deployments
        return f"https://github.com/{repository}/{target.removeprefix('../../')}"
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"https://github.com/{repository}/{kind}/main/{target}{mark}{anchor}"


def publish(source, folder):
    """Writes one page into the site."""
    def led(found):
        return f'{found[1]}="{address(found[2], source, folder)}"'

    text = text_of(source)
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        text = text.replace("github.com/OWNER/NAME", f"github.com/{repository}")
    text = text.replace("</head>", f"{BAR_STYLE}</head>", 1)
    text = text.replace("<body>", f"<body>\n{bar(source)}", 1)
    file = folder / PAGES[source]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(r'\b(href|src)="([^"]*)"', led, text), encoding="utf-8")


def build(folder):
    for source in PAGES:
        publish(source, folder)
    shutil.copy(folder / PAGES[FIRST], folder / "index.html")


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the site is built")
    folder = parser.parse_args(argv).folder
    build(folder)
    print(f"{len(PAGES)} pages. Open {folder / 'index.html'} in a browser.")


if __name__ == "__main__":
    main(sys.argv[1:])
