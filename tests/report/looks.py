"""How pages look, in few numbers, to be compared loosely; `python -m tests.report.looks` writes them anew.

A picture becomes a grid of average colours. Other fonts move letters a little and the averages hardly; a section that
is missing, a wrong theme or a broken layout moves them a lot.
"""

import json
import sys
import tempfile
from pathlib import Path

from gradgate._payload import encode
from gradgate.records import Incident
from gradgate.report import render_page
from tests.report.browsing import chromium, opened
from tests.report.made import MemoryBook, diagnosis

FILE = Path(__file__).with_name("looks.json")
GRID = (32, 48)
SCENES = {
    "light": {"size": (1280, 900), "scheme": "light"},
    "dark": {"size": (1280, 900), "scheme": "dark"},
    "phone": {"size": (390, 844), "scheme": "light"},
}

AVERAGES = """async ([picture, width, height]) => {
  const image = new Image();
  image.src = "data:image/png;base64," + picture;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  const data = context.getImageData(0, 0, width, height).data;
  return Array.from(data).filter((_, place) => place % 4 < 3);
}"""


def sample_page():
    """The same page every time: 240 incidents of three causes, with pictures, and a diagnosis."""
    import torch

    incidents = [
        Incident(
            id=f"{place:08x}",
            run="night",
            step=place * 3,
            sample_id=f"img_{place * 7 % 61:03}.png",
            stage=("loss", "backward", "load")[place % 3],
            cause=("exception", "non-finite gradient", "exception")[place % 3],
            exception_type="builtins.ValueError" if place % 3 == 0 else None,
            message="could not convert string to float: 'n/a'" if place % 3 == 0 else "a gradient is not finite",
            where="train.py:57",
            time=1.7e9 + place * 40 + (place % 17) * 9,
            transient=place % 20 == 0,
        )
        for place in range(240)
    ]
    picture = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    picture[0, 0, 3, 3:5] = float("nan")
    payloads = {one.id: encode({"image": picture, "label": torch.tensor([3])}) for one in incidents[::3]}
    book = MemoryBook(incidents, payloads, bad={"img_000.png", "img_007.png"})
    return render_page(book, diagnosis(), name="night.ledger")


def look(browser, address, scene):
    """Give the averages of a page; on a phone of its first screen, as other fonts break lines and move the rest."""
    with opened(browser, address, **SCENES[scene]) as page:
        page.locator("footer").evaluate("element => element.remove()")  # It tells the time.
        picture = page.screenshot(full_page=scene != "phone")
    with_canvas = browser.new_page()
    try:
        import base64

        return with_canvas.evaluate(AVERAGES, [base64.b64encode(picture).decode(), *GRID])
    finally:
        with_canvas.close()


def distance(one, other):
    """The mean difference of two looks, between 0 and 255."""
    assert len(one) == len(other)
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def main():
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "page.html"
        path.write_text(sample_page(), encoding="utf-8")
        looks = {scene: bytes(look(browser, path.as_uri(), scene)).hex() for scene in SCENES}
    FILE.write_text(json.dumps(looks, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
