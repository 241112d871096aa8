"""Colours for pictures: one per rank, and a ramp for places.

Built in OKLCH, where equal steps look equal: ranks differ in hue and, from one to the next, in
lightness, so that neighbours can be told apart without seeing hue; the ramp climbs in lightness
from the first byte to the last, so that it reads in grey as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import cos, pi, sin

RGB = tuple[int, int, int]

_EMPTY: RGB = (226, 228, 232)


@cache
def of_rank(rank: int, ranks: int) -> RGB:
    """The colour of `rank` among `ranks`; light grey for nobody."""
    if rank < 0:
        return _EMPTY
    turns = max(ranks, 6)
    hue = 255 + 360 * rank / turns
    lightness = (0.62, 0.78, 0.70)[rank % 3 if ranks > 8 else rank % 2]
    return _oklch(lightness, 0.13, hue)


@cache
def of_place(thousandths: int) -> RGB:
    """The colour of a place in the canonical page, dark at its first byte and light at its last."""
    if thousandths < 0:
        return _EMPTY
    share = min(thousandths, 1000) / 1000
    return _oklch(0.30 + 0.60 * share, 0.09 + 0.06 * sin(pi * share), 280 - 190 * share)


def blend(colours: Iterable[RGB]) -> RGB:
    """The average of colours as light: what a cell looks like that stands for several."""
    found = list(colours)
    linear = [sum(_linear(c[i] / 255) for c in found) / len(found) for i in range(3)]
    return (_byte(linear[0]), _byte(linear[1]), _byte(linear[2]))


def ink(background: RGB) -> RGB:
    """Black or white, whichever can be read on `background`."""
    r, g, b = (_linear(value / 255) for value in background)
    return (20, 22, 26) if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 else (255, 255, 255)


def css(colour: RGB) -> str:
    """``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _oklch(lightness: float, chroma: float, hue: float) -> RGB:
    a, b = chroma * cos(hue * pi / 180), chroma * sin(hue * pi / 180)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _byte(4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short),
        _byte(-1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short),
        _byte(-0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short),
    )


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def _byte(linear: float) -> int:
    value = min(1.0, max(0.0, linear))
    encoded = 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
    return round(255 * encoded)
