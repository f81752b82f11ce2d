"""Builds the site: the three pages to play with. All other pages are read on GitHub, which shows
Markdown, formulas and notebooks.

    python docs/publish.py FOLDER

A link to one of the three pages stays as it is. Any other link leads to the file on GitHub, in the
repository that GITHUB_REPOSITORY (OWNER/NAME) names; .github/workflows/pages.yml sets it.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import normpath

DOCS = Path(__file__).resolve().parent
# what a preview says of a page where it is linked; the first one is the site's first page
PAGES = {
    "you.html": "You are the only teacher of a small language model. Click the answers that you "
                "like, and it learns your taste, in your browser.",
    "live.html": "Two small language models learn to think in your browser, one by GRPO, one by "
                 "CPPO. Which one is right first?",
    "step.html": "The way through the CPPO paper: each equation, its line of code, and its number "
                 "for each token of a real step.",
}


def page(name, repository):
    """The text of a page of the site."""
    def led(found):
        target = normpath(f"docs/{found[1]}")
        kind = "tree" if (DOCS.parent / target).is_dir() else "blob"
        return f'href="https://github.com/{repository}/{kind}/main/{target}'

    owner, project = repository.split("/")
    facts = {"description": PAGES[name],
             "image": f"https://{owner.lower()}.github.io/{project}/card.png"}
    tags = "\n".join(f'<meta property="og:{key}" content="{x}">' for key, x in facts.items())
    text = (DOCS / name).read_text(encoding="utf-8").replace("</head>", f"{tags}\n</head>", 1)
    text = text.replace("github.com/OWNER/NAME", f"github.com/{repository}")
    others = "|".join(map(re.escape, PAGES))
    return re.sub(rf'href="(?!https?:|data:|#|(?:{others})\b)([^"#]*)', led, text)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the site")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    repository = os.environ.get("GITHUB_REPOSITORY", "OWNER/NAME")
    for name in PAGES:
        (folder / name).write_text(page(name, repository), encoding="utf-8")
    shutil.copy(folder / next(iter(PAGES)), folder / "index.html")
    shutil.copy(DOCS / "card.png", folder)


if __name__ == "__main__":
    main(sys.argv[1:])
