"""Builds the site: a start page, the three pages to play with, and the slides. All other pages are
read on GitHub, which shows Markdown, formulas and notebooks.

    python docs/publish.py FOLDER
    python docs/publish.py --address OWNER/NAME

Run the second command once, by hand, and commit what it changes: it writes the address of the
repository and of its site into the project's pages. The first command is run at each push by
.github/workflows/pages.yml. A link between the pages of the site stays as it is. Any other link
leads to the file on GitHub, in the repository that GITHUB_REPOSITORY names; GitHub sets it. A
picture is put into its page.
"""

import argparse
import base64
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).resolve().parents[1]
# what a preview says of a page where it is linked
PAGES = {
    "index.html": "GRPO and CPPO, to play with: three pages that run in your browser.",
    "you.html": "You are the only teacher of a small language model. Click the answers that you "
                "like, and it learns your taste, in your browser.",
    "live.html": "Two small language models learn to think in your browser, one by GRPO, one by "
                 "CPPO. Which one is right first?",
    "step.html": "The way through the CPPO paper: each equation, its line of code, and its number "
                 "for each token of a real step.",
    "slides.html": "A lecture of an hour on GRPO and CPPO, with notes and exercises.",
}
ADDRESS = "https://github.com/OWNER/NAME"
# the files that name the address of the repository, or link a page of the site
NAMING = ("README.md", "pyproject.toml", "CITATION.cff", "docs/**/*.md", "experiments/**/*.md",
          "notebooks/*.ipynb")


def site_of(repository):
    owner, project = repository.split("/")
    return f"https://{owner.lower()}.github.io/{project}"


def page(name, repository):
    """The text of a page of the site."""
    def led(found):
        return f'href="https://github.com/{repository}/blob/main/{normpath("docs/" + found[1])}'

    def data(found):
        picture = base64.b64encode((ROOT / "docs" / found[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{picture}"'

    tags = (f'<meta property="og:description" content="{PAGES[name]}">\n'
            f'<meta property="og:image" content="{site_of(repository)}/card.png">\n')
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    text = text.replace("</head>", f"{tags}</head>", 1)
    text = re.sub(r'src="([^":]+\.png)"', data, text)
    return re.sub(r'href="(?!https?:|data:|#|\w+\.html\b)([^"#]*)', led, text)


def build(folder, repository):
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / name).write_text(page(name, repository), encoding="utf-8")
    shutil.copy(ROOT / "docs/card.png", folder)


def write_address(repository):
    """A page of the site is then linked where it is published, because GitHub shows the source of
    an HTML file."""
    if not re.fullmatch(r"[\w-]+/[\w.-]+", repository):
        raise SystemExit(f"{repository}: write the address as OWNER/NAME.")
    if ADDRESS not in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        raise SystemExit("pyproject.toml has its address already: nothing was changed.")
    site = site_of(repository)
    for path in (path for pattern in NAMING for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8").replace("OWNER/THIS_REPOSITORY", repository)
        text = text.replace(ADDRESS, f"https://github.com/{repository}")
        text = re.sub(r"\]\((?:\.\./)?(?:docs/)?index\.html\)\*\*( \(open .*?\)|（.*?）)",
                      f"]({site}/)**", text)
        text = re.sub(r"\]\((?:\.\./)*(?:docs/)?(you|live|step|slides)\.html",
                      rf"]({site}/\1.html", text)
        path.write_text(text, encoding="utf-8")


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the site")
    parser.add_argument("--address", metavar="OWNER/NAME", help="of the repository on GitHub")
    options = parser.parse_args(argv)
    if options.address:
        write_address(options.address)
    elif options.folder:
        build(options.folder, os.environ.get("GITHUB_REPOSITORY", "OWNER/NAME"))
    else:
        parser.error("name the folder of the site, or --address OWNER/NAME.")


if __name__ == "__main__":
    main(sys.argv[1:])
