"""Where is a Chinese page behind its English one? No test asks; this program lists it.

    python docs/stale.py                                    list the sections of all pages
    python docs/stale.py --translated docs/zh/family.md     after translating: write it down

The last line of a Chinese page, a comment, holds a fingerprint of each English section as it was
translated. So a section whose English text is another now is listed. A section runs from one
heading to the next.
"""

import argparse
import hashlib
import re
import sys
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/zh/*.md"))
REST = "## 其余各节（英文）"  # a page may end so, with links to what is not translated
FINGERPRINTS = re.compile(r"^<!-- English sections: (.*) -->\n?", re.MULTILINE)


def english_page(page):
    if page.name == "home.md":
        return page.parents[2] / "README.md"
    return page.parents[1] / page.name


def sections(page):
    """The texts of a page's sections, with their headings."""
    found, fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if line.startswith("#") and not fenced:
            found.append(line)
        else:
            found[-1] += f"\n{line}"
    return found


def translated(page):
    """{fingerprint: heading} of the English sections that a Chinese page has, too."""
    english, chinese = sections(english_page(page)), sections(page)
    if chinese[-1].startswith(REST):
        english = english[: len(chinese) - 1]
    found = {}
    for section in english:
        words = " ".join(section.split())  # where a line ends does not matter
        found[hashlib.sha256(words.encode()).hexdigest()[:4]] = section.split("\n")[0]
    return found


def stale(page):
    """The headings of the English sections that are others than were translated."""
    written = FINGERPRINTS.search(page.read_text(encoding="utf-8"))
    old = written[1].split() if written else []
    return [heading for mark, heading in translated(page).items() if mark not in old]


def write_down(page):
    """The last line of a Chinese page: it is a translation of the English text of today."""
    text = FINGERPRINTS.sub("", page.read_text(encoding="utf-8")).rstrip()
    marks = " ".join(translated(page))
    page.write_text(f"{text}\n\n<!-- English sections: {marks} -->\n", encoding="utf-8")


def main(argv):
    parser = argparse.ArgumentParser()
    names = {relpath(page, ROOT): page for page in PAGES}
    parser.add_argument("--translated", nargs="+", choices=names, default=[], metavar="PAGE",
                        help="write down that these Chinese pages are translated")
    for name in parser.parse_args(argv).translated:
        write_down(names[name])
    for name, page in names.items():
        if found := stale(page):
            print(name, *found, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
