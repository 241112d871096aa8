"""Scenes as files: SVG and HTML from nothing but text, PNG with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vkvmap.describe.colour import RGB, css, of_rank
from vkvmap.describe.picture import Picture
from vkvmap.describe.scene import INK, PAPER, SOFT, Rect, Scene, Words, lay_out
from vkvmap.errors import VkvmapError

FORMATS = ("svg", "png", "html")

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_SCALE = 2  # device pixels per pixel of a PNG


class RenderError(VkvmapError):
    """A picture cannot be written in that form; the message says what is missing."""


def write(picture: Picture, path: Path) -> None:
    """Write `picture` to `path` in the form that its suffix names.

    Raises RenderError for another suffix, or for PNG where Pillow is missing.
    """
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        raise RenderError(f"{path.name}: pictures are written as .svg, .png or .html")
    scene = lay_out(picture)
    if suffix == "svg":
        path.write_text(svg(scene), encoding="utf-8")
    elif suffix == "html":
        path.write_text(html(scene), encoding="utf-8")
    else:
        _png(scene, path)


def svg(scene: Scene) -> str:
    """The scene as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width:.0f}" '
        f'height="{scene.height:.0f}" viewBox="0 0 {scene.width:.0f} {scene.height:.0f}" '
        f'font-family="{escape(_FONT, quote=True)}" role="img">',
        f"<title>{escape(scene.title)}</title>",
    ]
    lines += [
        _svg_rect(item) if isinstance(item, Rect) else _svg_words(item) for item in scene.items
    ]
    return "\n".join([*lines, "</svg>\n"])


def _svg_rect(item: Rect) -> str:
    at = f'x="{item.x:.5g}" y="{item.y:.5g}" width="{item.w:.5g}" height="{item.h:.5g}"'
    if item.stroke is not None:
        return f'<rect {at} fill="none" stroke="{css(item.stroke)}" stroke-width="1"/>'
    corner = f' rx="{item.radius:.3g}"' if item.radius else ' shape-rendering="crispEdges"'
    return f'<rect {at} fill="{css(item.fill)}"{corner}/>'


def _svg_words(item: Words) -> str:
    weight = ' font-weight="600"' if item.bold else ""
    anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
    return (
        f'<text x="{item.x:.5g}" y="{item.y:.5g}" font-size="{item.size:.3g}" '
        f'fill="{css(item.fill)}"{weight}{anchor} xml:space="preserve">{escape(item.text)}</text>'
    )


def html(scene: Scene) -> str:
    """The scene as a page that stands alone."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(scene.title)}</title>\n"
        "<style>body{margin:0;background:#eef0f4}figure{margin:24px auto;width:max-content;"
        "max-width:calc(100% - 32px);overflow:auto;background:#fff;border-radius:8px;"
        "box-shadow:0 1px 6px #0002}svg{display:block}</style>\n</head>\n<body>\n<figure>\n"
        f"{svg(scene)}</figure>\n</body>\n</html>\n"
    )


def _png(scene: Scene, path: Path) -> None:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise RenderError(
            "PNG needs Pillow, the extra vkvmap[pictures]: pip install pillow; or write .svg"
        ) from None
    size = (round(scene.width * _SCALE), round(scene.height * _SCALE))
    image = Image.new("RGB", size, (255, 255, 255))
    pen = ImageDraw.Draw(image)
    fonts: dict[int, Any] = {}
    for item in scene.items:
        if isinstance(item, Rect):
            _png_rect(pen, item)
            continue
        points = max(6, round(item.size * _SCALE))
        if points not in fonts:
            fonts[points] = ImageFont.load_default(points)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[item.anchor]
        at = (item.x * _SCALE, item.y * _SCALE)
        ink: RGB = item.fill
        for shift in (0, 1) if item.bold else (0,):
            pen.text((at[0] + shift, at[1]), item.text, ink, fonts[points], anchor)
    image.save(path, optimize=True)


def _png_rect(pen: Any, item: Rect) -> None:
    left, top = round(item.x * _SCALE), round(item.y * _SCALE)
    right = max(left, round((item.x + item.w) * _SCALE) - 1)
    bottom = max(top, round((item.y + item.h) * _SCALE) - 1)
    box = (left, top, right, bottom)
    if item.stroke is not None:
        pen.rectangle(box, outline=item.stroke, width=1)
    elif item.radius:
        pen.rounded_rectangle(box, radius=item.radius * _SCALE, fill=item.fill)
    else:
        pen.rectangle(box, fill=item.fill)


def bars(title: str, values: Sequence[tuple[str, float, str]]) -> str:
    """Ratios, and what of, as horizontal bars in an SVG document; the line stands at 1."""
    scene = Scene(width=900.0, height=70.0 + 22 * len(values), title=title)
    scene.add(Rect(0, 0, scene.width, scene.height, PAPER))
    scene.add(Words(24, 34, title, 16, bold=True))
    left, room = 430.0, 380.0
    most = max([1.0, *(value for _, value, _ in values)])
    one = left + room / most
    for index, (name, value, sense) in enumerate(values):
        top = 52.0 + 22 * index
        better = value <= 1 if sense == "the time" else value >= 1
        shade = of_rank(0, 6) if better else of_rank(3, 6)
        scene.add(Words(left - 8, top + 12, name, 11, INK, "end"))
        scene.add(Rect(left, top, max(1.0, room * value / most), 16, shade, radius=2))
        text = f"{value:.3g}x {sense}"
        after = left + room * value / most + 6
        if after + 6 * len(text) > scene.width:  # no room beside the bar: in it
            after = left + 6
        scene.add(Words(after, top + 12, text, 11, INK if after < left + 8 else SOFT))
    scene.add(Rect(one - 0.5, 46, 1, 22.0 * len(values) + 4, SOFT))
    return svg(scene)
