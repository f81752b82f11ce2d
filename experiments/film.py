"""Makes docs/learn.webp, the moving picture of the README: docs/live.html in Chromium.

    python experiments/film.py

The page shows a recorded run (docs/live/earlier.json). The film shows its first 20 seconds in 10:
later both curves are above the line. It begins with its last picture, which is seen wherever
nothing moves. This picture is also docs/card.png, the preview of a page that is linked somewhere.
"""

import argparse
import base64
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.browser import Browser  # noqa: E402

SECONDS = 20
WIDTH, HEIGHT = 948, 420  # as wide as GitHub shows a README
CARD = {"width": 960, "height": 504, "scale": 1.25}  # 1200 × 630 pixels
FRAMES = 100
LAST, FIRST, FRAME = 3000, 1000, 100  # milliseconds that a frame is seen


def picture(page):
    shot = page.ask("Page.captureScreenshot", format="png")["data"]
    return Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")


def frames(seconds, width=WIDTH, height=HEIGHT, scale=1):
    with Browser() as browser:
        page = browser.open(f"{ROOT}/docs/live.html#film&lang=en", width, height)
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=scale, mobile=False)
        page.ask("Emulation.setScrollbarsHidden", hidden=True)
        page.run("document.getElementById('story').style.display = 'block'")  # also if it is empty
        for second in seconds:
            page.run(f"film({second})")
            yield picture(page)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    [card] = frames([SECONDS], **CARD)
    card.save(ROOT / "docs/card.png", optimize=True)
    *others, last = frames(np.linspace(0, SECONDS, FRAMES))
    last.save(
        ROOT / "docs/learn.webp", save_all=True, append_images=others, lossless=True,
        duration=[LAST, FIRST, *[FRAME] * (FRAMES - 2)])
    print("written: docs/learn.webp and docs/card.png")


if __name__ == "__main__":
    main(sys.argv[1:])
