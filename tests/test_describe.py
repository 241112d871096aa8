"""What is explained and drawn is what the mappings say, in every form that it is drawn in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from vkvmap.cli import main
from vkvmap.configuration import Configuration
from vkvmap.describe import colour, estimate
from vkvmap.describe.explain import explain
from vkvmap.describe.picture import NOBODY, Picture, draw
from vkvmap.describe.render import RenderError, html, svg, write
from vkvmap.describe.scene import LINE, PAPER, Rect, Words, lay_out
from vkvmap.describe.terminal import lines
from vkvmap.models import from_hf_config, load_model
from vkvmap.roundtrip.truth import Holder
from vkvmap.spec import LayerTable

ATTENTION = "model.layers.0.self_attn.attn"
SMALL = {"model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 16}


def table(**more: Any) -> LayerTable:
    return from_hf_config({**SMALL, **more})


def picture(*sides: str, heads: int = 8, **more: Any) -> Picture:
    configurations = [Configuration.parse(text) for text in sides]
    return draw("m", table(num_key_value_heads=heads), ATTENTION, configurations, **more)


# ---- pictures say what the rules say -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "heads"),
    [("tp=4", 8), ("tp=8", 2), ("tp=16,dcp=2", 8), ("tp=4,dcp=4,interleave=2", 1), ("pcp=2", 8)],
)
@pytest.mark.parametrize("family", ["native", "universal"])
def test_the_canonical_page_is_coloured_by_who_holds_each_cell(
    text: str, heads: int, family: Any
) -> None:
    side = Configuration.parse(text)
    drawn = picture(text, heads=heads, family=family).sides[0]
    (plane,) = drawn.canonical.planes
    assert plane.values.shape == (side.span, heads * 2)
    for rank in range(side.grid.size):
        holder = Holder(side.tp, side.dcp, side.pcp, side.interleave, side.pcp_mode, rank)
        tokens = holder.tokens_of(0, side.block_size, sharded=True)
        columns = [c for head in holder.part_of(heads, heads) for c in (2 * head, 2 * head + 1)]
        mine = plane.values[np.ix_(tokens, columns)]
        # Replicas take turns, so a cell is this rank's or, where it is shared, another holder's.
        assert (mine == rank).all() or (mine != rank).all()
    assert (plane.values != NOBODY).all()


def test_other_replicas_write_other_pages() -> None:
    first = picture("tp=8", heads=2, page=0).sides[0].canonical
    second = picture("tp=8", heads=2, page=1).sides[0].canonical
    assert sorted(set(first.planes[0].values.ravel().tolist())) == [0, 4]
    assert sorted(set(second.planes[0].values.ravel().tolist())) == [1, 5]


def test_a_rank_page_is_marked_with_where_its_cells_go() -> None:
    side = picture("tp=4,dcp=2,layout=split_hnd", heads=2, ranks=(3,)).sides[0]
    (panel,) = side.local
    keys, values = panel.planes
    assert (keys.label, values.label) == ("K", "V")
    assert (keys.rows, keys.columns) == ("head", "token")
    # Rank 3 holds head 1 and the odd tokens; in a native page [K|V][head][token] this is row h1.
    assert list(keys.marks[0]) == [f"h1 t{t}" for t in range(1, 32, 2)]
    assert all(np.diff(plane.values[0]).min() >= 0 for plane in panel.planes)
    assert keys.values.max() < values.values.min()


def test_a_cell_that_is_scattered_says_from_where_to_where() -> None:
    side = picture("tp=8,layout=cpu_hnd", "tp=1", ranks=(2,)).sides[0]
    assert side.local[0].planes[0].marks[0] == ("t0..t15 h2", "t0..t15 h2")


@pytest.mark.parametrize("text", ["tp=4", "tp=16,dcp=2", "tp=4,dcp=2,layout=split_hnd"])
def test_beside_a_rank_page_is_the_part_of_the_canonical_page_that_it_fills(text: str) -> None:
    side = Configuration.parse(text)
    heads = 8 if side.tp != 4 or side.dcp == 1 else 2
    (drawn,) = picture(text, heads=heads, ranks=range(side.grid.size), family="universal").sides
    for rank, panel in enumerate(drawn.local):
        holder = Holder(side.tp, side.dcp, side.pcp, side.interleave, side.pcp_mode, rank)
        tokens = holder.tokens_of(0, side.block_size, sharded=True)
        columns = [c for head in holder.part_of(heads, heads) for c in (2 * head, 2 * head + 1)]
        expected = np.full((side.span, heads * 2), NOBODY)
        expected[np.ix_(tokens, columns)] = rank
        assert (panel.part[0].values == expected).all()


def test_channels_of_state_are_named_exactly_although_few_are_drawn() -> None:
    layers = load_model("qwen3-next-80b-a3b")
    sides = [Configuration.parse("tp=4")]
    drawn = draw("q", layers, "model.layers.0.linear_attn", sides, ranks=(1,))
    conv_q = drawn.sides[0].local[0].planes[0]
    # A quarter of 2048 channels is 512, and rank 1 has the second.
    assert [mark for (mark,) in conv_q.marks] == [f"c{512 + n}" for n in conv_q.row_numbers]


def test_state_is_drawn_by_its_segments() -> None:
    layers = load_model("qwen3-next-80b-a3b")
    drawn = draw("q", layers, "model.layers.0.linear_attn", [Configuration.parse("tp=4")])
    planes = drawn.sides[0].canonical.planes
    assert [plane.label for plane in planes] == ["conv_q", "conv_k", "conv_v", "temporal"]
    for plane in planes:
        owners = plane.values[:, 0].tolist()
        assert owners == sorted(owners) and set(owners) == {0, 1, 2, 3}
        assert plane.row_numbers[1] - plane.row_numbers[0] >= 1


def test_an_uncertified_layer_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="heads-divide"):
        picture("tp=3")


# ---- on paper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [("tp=4", "tp=2,layout=split_hnd"), ("tp=16,dcp=2",)])
def test_rectangles_cover_every_cell_once_in_its_colour(sides: tuple[str, ...]) -> None:
    drawn = picture(*sides)
    scene = lay_out(drawn)
    fills = [item for item in scene.items if isinstance(item, Rect) and item.stroke is None]
    frames = [item for item in scene.items if isinstance(item, Rect) and item.stroke is not None]
    planes = [
        (plane, panel, side)
        for side in drawn.sides
        for panel in (side.canonical, *side.local)
        for plane in panel.planes
    ]
    assert len(frames) == len(planes)
    for frame, (plane, panel, side) in zip(frames, planes, strict=True):
        rows, columns = plane.values.shape
        for row in range(rows):
            for column in range(0, columns, 3):
                x = frame.x + (column + 0.3) * frame.w / columns
                y = frame.y + (row + 0.3) * frame.h / rows
                value = int(plane.values[row, column])
                wanted = (
                    colour.of_rank(value, side.ranks) if panel.by_rank else colour.of_place(value)
                )
                over = [
                    r.fill
                    for r in fills
                    if r.x <= x < r.x + r.w and r.y <= y < r.y + r.h
                    if r.fill not in (PAPER, LINE)
                ]
                assert over == [wanted]


@pytest.mark.parametrize("heads", [8, 128])
def test_nothing_is_drawn_outside_the_paper(heads: int) -> None:
    sides = [Configuration.parse(f"tp={heads},block={2 * heads}"), Configuration.parse("tp=1")]
    _stays_on_paper(lay_out(draw("m", table(num_key_value_heads=heads), ATTENTION, sides)))


@pytest.mark.parametrize("layout", ["split_hnd", "split_nhd", "packed_hnd", "packed_nhd"])
@pytest.mark.parametrize("text", ["tp=8,block=256", "tp=1,block=512", "tp=128"])
def test_large_pages_of_any_layout_stay_in_their_half(text: str, layout: str) -> None:
    sides = [Configuration.parse(f"{text},layout={layout}")] * 2
    scene = lay_out(draw("m", table(num_key_value_heads=128), ATTENTION, sides))
    _stays_on_paper(scene)
    middle = scene.width / 2
    for item in scene.items[2:]:  # after the paper and the line between the halves
        if isinstance(item, Rect):
            assert item.x + item.w <= middle + 0.01 or item.x >= middle - 0.01


def test_wide_planes_stand_below_each_other_with_room_for_their_marks() -> None:
    drawn = picture("tp=16,dcp=2,layout=split_hnd", ranks=(0,))
    words = [item for item in lay_out(drawn).items if isinstance(item, Words)]
    keys, values = (next(w for w in words if w.text == f"{what} tokens ->") for what in "KV")
    assert keys.x == values.x and keys.y < values.y
    assert [w.text for w in words].count("t30") == 2


def _stays_on_paper(scene: Any) -> None:
    for item in scene.items:
        assert 0 <= item.x <= scene.width and 0 <= item.y <= scene.height
        if isinstance(item, Rect):
            assert item.x + item.w <= scene.width + 0.01 and item.w > 0 and item.h > 0
        else:
            assert isinstance(item, Words) and item.size >= 6


def test_a_large_page_stays_a_small_file() -> None:
    drawn = picture("tp=16,block=256", heads=128)
    assert drawn.sides[0].canonical.planes[0].values.size == 256 * 256
    assert len(svg(lay_out(drawn))) < 400_000


def test_svg_and_html_are_well_formed_and_hold_the_words() -> None:
    drawn = picture("tp=2", "tp=4")
    root = ElementTree.fromstring(svg(lay_out(drawn)))
    words = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("canonical page" in text for text in words) and "rank 3" in words
    page = html(lay_out(drawn))
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    for suffix, magic in (("svg", b"<svg"), ("html", b"<!doctype"), ("png", b"\x89PNG")):
        file = tmp_path / f"page.{suffix}"
        write(picture("tp=2"), file)
        assert file.read_bytes().startswith(magic)
    with pytest.raises(RenderError, match=r"\.svg"):
        write(picture("tp=2"), tmp_path / "page.gif")


def test_colours_tell_ranks_apart_and_places_in_order() -> None:
    for ranks in (2, 8, 16, 32):
        assert len({colour.of_rank(rank, ranks) for rank in range(ranks)}) == ranks
    greys = [sum(colour.of_place(place)) for place in range(0, 1001, 100)]
    assert greys == sorted(greys)
    assert colour.of_rank(NOBODY, 4) == colour.of_place(NOBODY)
    assert colour.blend([(0, 0, 0), (255, 255, 255)]) == (188, 188, 188)
    for rank in range(8):
        shade = colour.of_rank(rank, 8)
        assert abs(sum(colour.ink(shade)) - sum(shade)) > 200


# ---- in the terminal -----------------------------------------------------------------------------


def test_without_colour_cells_are_the_ranks_digits() -> None:
    text = [line.plain for line in lines(picture("tp=4"), 100, colours=False)]
    first = next(line for line in text if line.startswith("   0 "))
    assert first.split() == ["0", *"0000111122223333"]
    assert all(line.style != "on" for line in lines(picture("tp=4"), 100, colours=False))


def test_a_page_whose_cells_have_no_room_for_words_says_what_it_holds() -> None:
    drawn = picture("tp=16,block=256,layout=packed_nhd", heads=128, ranks=(5,), family="universal")
    plain = [line.plain for line in lines(drawn, 70, colours=True)]
    assert "page on rank 5 t0 h40 to t255 h47" in plain


def test_many_rows_go_on_beside_themselves() -> None:
    drawn = picture("tp=4,dcp=4", heads=1)  # 64 tokens, dealt out one by one
    plain = [line.plain for line in lines(drawn, 80, colours=False, height=16)]
    rows = [line.split() for line in plain if re.match(r" +\d+ \S", line)]
    told = {int(row[i]): row[i + 1 : i + 3] for row in rows[:16] for i in range(0, len(row), 3)}
    assert told == {token: [str(token % 4)] * 2 for token in range(64)}


def test_a_folded_cell_that_hides_a_difference_says_so() -> None:
    drawn = picture("tp=2,dcp=2,block=64", heads=1)
    plain = [line.plain for line in lines(drawn, 60, colours=False, height=16)]
    assert any(line.split() == ["0", "+", "+"] for line in plain)
    assert any("a cell is 8 x 1" in line for line in plain)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("colours", [True, False])
def test_lines_fit_the_width(width: int, colours: bool) -> None:
    drawn = picture("tp=16,block=256", "tp=4,pcp=4,block=64", heads=128)
    found = lines(drawn, width, colours=colours)[3:]
    assert max(line.cell_len for line in found) <= width
    assert len(found) < 130


def _backgrounds(line: Any) -> list[str]:
    return [
        str(span.style.bgcolor.name) for span in line.spans if hasattr(span.style, "bgcolor")
        for _ in (span.style.bgcolor,) if _ is not None
    ]  # fmt: skip


def test_in_colour_every_cell_has_its_background() -> None:
    line = next(x for x in lines(picture("tp=4"), 100, colours=True) if x.plain.startswith("   0 "))
    expected = [colour.css(colour.of_rank(rank, 4)) for rank in (0, 1, 2, 3) for _ in range(4)]
    assert _backgrounds(line) == expected


def test_cells_without_text_are_drawn_to_the_end_of_the_line() -> None:
    drawn = picture("tp=8,layout=split_hnd,block=64", ranks=(0,))
    line = lines(drawn, 150, colours=True)[-1]
    assert len(_backgrounds(line)) == 2 * 64
    assert max(span.end for span in line.spans) <= len(line.plain)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


def show(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(["show", *line])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_show_draws_both_sides_in_the_terminal(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = show(capsys, config, "--from", "tp=4", "--to", "tp=2", "--width", "120")
    assert code == 0
    assert "tp=4,layout=packed_nhd,block=16" in out and "page on rank 1" in out
    assert max(map(len, out.splitlines())) <= 120


def test_show_colours_on_request(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [config, "--from", "tp=2"]
    assert "\x1b[" in show(capsys, *line, "--colour", "always")[1]
    assert "\x1b[" not in show(capsys, *line, "--colour", "never")[1]


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ("--ranks all", lambda a: len(a["sides"][0]["local"]) == 4),
        ("--ranks 3", lambda a: a["sides"][0]["local"][0]["title"] == "page on rank 3"),
        ("--ranks 0", lambda a: len(a["sides"][0]["local"]) == 1),
        ("--page 1", lambda a: "page 1" in a["note"]),
        ("--family universal", lambda a: "universal" in a["note"]),
        ("--layer layers.0", lambda a: a["title"].endswith(ATTENTION)),
        ("--layer " + ATTENTION, lambda a: a["title"].endswith(ATTENTION)),
        ("--layout split_nhd", lambda a: len(a["sides"][0]["local"][0]["planes"]) == 2),
        ("--block-size 4", lambda a: len(a["sides"][0]["canonical"]["planes"][0]["values"]) == 4),
        ("--kv-dtype fp32", lambda a: "16,384 bytes" in a["sides"][0]["canonical"]["note"]),
        (
            "--set num_key_value_heads=4",
            lambda a: "4,096 bytes" in a["sides"][0]["canonical"]["note"],
        ),
        ("--pcp-mode replicates", lambda a: len(a["sides"]) == 1),
        ("--to tp=1", lambda a: len(a["sides"]) == 2),
    ],
)
def test_every_option_of_show_reaches_the_picture(
    config: str, more: str, check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = show(capsys, config, "--from", "tp=4", "--json", *more.split())
    assert code == 0 and check(json.loads(out))


def test_show_writes_a_file(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.svg"
    code, out, _ = show(capsys, config, "--from", "tp=2", "--out", str(file))
    assert code == 0 and "page.svg" in out and file.read_text().startswith("<svg")


def test_png_without_pillow_says_what_to_install(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    code, _, err = show(capsys, config, "--from", "tp=2", "--out", str(tmp_path / "page.png"))
    assert code == 3 and "vkvmap[pictures]" in err


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ("--from tp=3", 1, "heads-divide"),
        ("--from tp=2 --ranks 2", 2, "ranks are 0 to 1"),
        ("--from tp=2 --ranks one", 2, "or write all"),
        ("--from tp=2 --layer layers.9", 2, "nearest: 'model.layers.0"),
        ("--from tp=2 --out page.gif", 2, "page.svg"),
        ("--from tp=2 --colour sometimes", 2, "--colour"),
        ("--from tp=2 --page -1", 2, "--page"),
        ("--from tp=2 --width 0", 2, "--width"),
        ("--from tp=2,dcp=3", 2, "must divide tp=2"),
        ("--from tp=2 --to tq=2", 2, "nearest right value: tp"),
        ("", 2, "--from"),
    ],
)
def test_wrong_input_to_show_is_answered(
    config: str, more: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = show(capsys, config, *more.split())
    assert found == code and says in err


# ---- numbers -------------------------------------------------------------------------------------


def test_fragments_of_the_report_are_those_of_the_bytes() -> None:
    sides = [Configuration.parse("tp=4,layout=split_nhd"), Configuration.parse("tp=2")]
    report = explain(table(), sides, tokens=64)
    first, second = report.sides
    # Universal pages are [token][head][K, V]: split K and V are apart, packed ones are one piece.
    assert (first.kinds[0].fragments, first.kinds[0].fragment_bytes) == (16 * 2 * 2, (32, 32))
    assert (second.kinds[0].fragments, second.kinds[0].fragment_bytes) == (16, (256, 256))
    assert first.load_bytes == 64 * 2 * 2 * 32
    assert second.load_bytes == 64 * 4 * 2 * 32


def test_replicas_share_the_stores() -> None:
    report = explain(table(num_key_value_heads=1), [Configuration.parse("tp=4")], tokens=1024)
    (side,) = report.sides
    assert side.kinds[0].num_writers == 4 and side.store_bytes * 4 == side.load_bytes


def test_estimates_follow_their_published_numbers() -> None:
    link = estimate.LINKS["pcie5"]
    big = estimate.kernel(link, 1e9, 1024, load=True)
    assert big.gbps == (52.0, 35.0) and big.seconds[0] == pytest.approx(1 / 52)
    assert estimate.sector_efficiency(64) == 1.0
    assert estimate.sector_efficiency(656) == pytest.approx(656 / 704)
    small = estimate.copy_engine(link, 1e6 * 256, 1e6)
    assert small.seconds == pytest.approx((0.5, 0.63))
    large = estimate.copy_engine(link, 1e9, 1e9 / (64 << 10))
    assert large.gbps == pytest.approx((55.0, 40.0))
    assert estimate.chosen(28 * 1024) == "copy_engine" and estimate.chosen(4096) == "kernel"
    assert estimate.LINKS["pcie4"].scale < 1 < estimate.LINKS["c2c"].scale
