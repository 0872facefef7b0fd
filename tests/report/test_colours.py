"""Texts can be read on every ground that they stand on, in light and in dark (WCAG AA: 4.5 to 1)."""

import re

import pytest

from tests.ledger.made import ROOT

LIGHT, DARK = (ROOT / "web" / "src" / "colours.css").read_text(encoding="utf-8").split("@media screen")


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_can_be_read(theme):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme))
    for text in ("ink", "muted", "accent", "bad", "warn", "good"):
        for ground in ("ground", "raised", "sunk", f"{text}-soft"):
            if ground in colours:
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def test_that_test_can_fail():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") < 4.5
