"""Builds the site: the pages to play with, the notebooks and all other pages, as HTML. It loads
nothing from a network: formulas become MathML.

    python docs/publish.py FOLDER
    python docs/publish.py --address https://github.com/OWNER/NAME

The second command writes the address of the repository and of its published pages into all pages.
.github/workflows/pages.yml does this at the first push.

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

PLACEHOLDER = "https://github.com/OWNER/NAME"
# how a page leads to the pages to play with, before and after the address is known
PLAY = {
    "README.md": (
        "[published pages](../../deployments) → github-pages → View deployment**, or open "
        "`docs/you.html` in your clone",
        "[you are the reward]({site}/you.html)** · [watch two learn]({site}/live.html)"),
    CHINESE: (
        "[发布的网页](../../../../deployments) → github-pages → View deployment**，"
        "或者在克隆里打开 `docs/you.html`",
        "[你就是奖励]({site}/you.html#lang=zh)** · [看两个模型学习]({site}/live.html#lang=zh)"),
}

# the line at the top of every page: {language: {what it says: where it leads}}. A heading of the
# start page is marked on the pages that it links
BARS = {
    "en": {
        "GRPO & CPPO": "README.md", "Play": FIRST, "Learn": "docs/README.md#learn",
        "Results": "docs/README.md#results", "Use": "docs/README.md#use",
        "Relatives": "docs/README.md#relatives", "Teach": "docs/README.md#teach", "Code": ".",
    },
    "zh": {
        "GRPO & CPPO": CHINESE, "体验": f"{FIRST}#lang=zh", "学习": "docs/zh/README.md#学习",
        "结果": "docs/zh/README.md#结果", "使用": "docs/zh/README.md#使用",
        "同类算法": "docs/zh/README.md#同类算法", "教学": "docs/zh/README.md#教学", "代码": ".",
    },
}  # fmt: skip
# what a preview says of a page; of any other page its first paragraph
ABOUT = {
    "README.md": "GRPO and CPPO, to read, to run and to copy: each formula stands above its line "
                 "of code, and each figure has its command.",
    CHINESE: "GRPO 与 CPPO：读得懂，跑得起来。每条公式写在对应代码的上方，"
             "每个数字旁边都有它的命令。",
    "docs/you.html": "You are the only teacher of a small language model. Click the answers that "
                     "you like, and it learns your taste, in your browser.",
    "docs/live.html": "Two small language models learn to think in your browser, one by GRPO, one "
                      "by CPPO. Which one is right first?",
    "docs/step.html": "The way through the CPPO paper: each equation, its line of code, and its "
                      "number for each token of a real step.",
}
BAR_STYLE = """<style>
.bar { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 8px; font-size: 15px; }
.bar a { color: inherit; }
.bar a:first-child, .bar [aria-current] { font-weight: bold; }
.bar [aria-current] { text-decoration: none; }
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
        before, after = PLAY.get(source, ("", ""))
        if before:  # the site itself has these pages
            text = text.replace(before, after.format(site=relpath("docs", dirname(source) or ".")))
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
        words = ""
        for name, page in own.items():
            here = ' aria-current="page"' if name == heading_of(source, language) else ""
            words += f'<a href="{top}/{page}"{here}>{html.escape(name)}</a>'
        made += f'<nav class="bar" lang="{language}">{words}</nav>\n'
    return made


def heading_of(source, language):
    """The heading of the start page under which a page is linked first; None: under no heading."""
    start = "docs/zh/README.md" if language == "zh" else "docs/README.md"
    heading = None
    for line in (ROOT / start).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        for link in re.findall(r"\]\(([^)#]*)", line):
            if normpath(join(dirname(start), link)) == source:
                return heading
    return None


def preview(source, text):
    """What others show of a page where it is linked."""
    title = re.search(r"<title>([^<]*)", text)[1]
    paragraphs = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
    # not a line of links
    first = next((words for words in paragraphs if len(words.split()) > 12), title)
    about = html.unescape(re.sub(r"<.*?>", "", ABOUT.get(source, first)))
    about = " ".join(about.split())
    if len(about) > 200:
        about = about[:199] + "…"
    picture = "card.png"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        owner, name = repository.split("/")
        picture = f"https://{owner.lower()}.github.io/{name}/card.png"
    facts = {"og:title": title, "og:description": about, "og:image": picture, "og:type": "website"}
    tags = [f'<meta name="description" content="{html.escape(about)}">']
    tags += [f'<meta property="{name}" content="{html.escape(html.unescape(words))}">'
             for name, words in facts.items()]
    return "\n".join(tags) + "\n"


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
    text = text.replace("</head>", f"{preview(source, text)}{BAR_STYLE}</head>", 1)
    text = text.replace("<body>", f"<body>\n{bar(source)}", 1)
    file = folder / PAGES[source]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(r'\b(href|src)="([^"]*)"', led, text), encoding="utf-8")


def write_address(address, root=ROOT):
    """Write the repository's address into the pages, in place of PLACEHOLDER. Links to the pages to
    play with then lead to the published ones, because a code host shows the source of a file."""
    if not (found := re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+?)/?", address)):
        raise SystemExit(f"{address}: write it as {PLACEHOLDER}.")
    if PLACEHOLDER not in (root / "pyproject.toml").read_text(encoding="utf-8"):
        raise SystemExit("pyproject.toml has its address already: nothing was changed.")
    owner, name = found.groups()
    site = f"https://{owner.lower()}.github.io/{name}"
    names = [page for page in PAGES if page.endswith(".md")]
    for source in [*names, "pyproject.toml", "CITATION.cff"]:
        text = (root / source).read_text(encoding="utf-8")
        text = text.replace(PLACEHOLDER, f"https://github.com/{owner}/{name}")
        before, after = PLAY.get(source, ("", ""))
        assert before in text, source
        if before:
            text = text.replace(before, after.format(site=site))
        text = re.sub(r"\]\((docs/|\.\./)?(you|live|step)\.html", rf"]({site}/\2.html", text)
        (root / source).write_text(text, encoding="utf-8")


def build(folder):
    for source in PAGES:
        publish(source, folder)
    shutil.copy(folder / PAGES[FIRST], folder / "index.html")
    shutil.copy(ROOT / "docs/card.png", folder)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", help="where the site is built")
    parser.add_argument("--address", help=f"of the repository: {PLACEHOLDER}")
    options = parser.parse_args(argv)
    if options.address:
        write_address(options.address)
        print("The address is written into the pages.")
        return
    if not (folder := options.folder):
        parser.error("name the folder of the site, or --address.")
    build(folder)
    print(f"{len(PAGES)} pages. Open {folder / 'index.html'} in a browser.")


if __name__ == "__main__":
    main(sys.argv[1:])
