"""Whatever people type, they get a result or a sentence, never a traceback or an endless run."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkvmap.cli import main
from vkvmap.configuration import KEYS, Configuration, ConfigurationError
from vkvmap.errors import SpecError
from vkvmap.layout import LAYOUTS
from vkvmap.models import PRESETS, from_hf_config
from vkvmap.nearest import nearest
from vkvmap.spec import LayerTable

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**19),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.integers(-1, 3), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)

WORDS = st.one_of(
    st.sampled_from([*KEYS, *LAYOUTS, "=", ",", "+", "1", "2", "16", "-1", "0", "1e3", " "]),
    st.text(max_size=3),
)


@given(st.lists(WORDS, max_size=9).map("".join))
def test_a_configuration_is_read_or_explained(text: str) -> None:
    try:
        made = Configuration.parse(text)
    except ConfigurationError as error:
        assert str(error)
        return
    assert Configuration.parse(str(made)) == made
    assert made.ranks == made.pp * made.grid.size


@given(
    st.builds(
        Configuration,
        tp=st.integers(1, 8),
        pcp=st.integers(1, 3),
        pp=st.integers(1, 4),
        interleave=st.just(1),
        layout=st.sampled_from(["split_nhd", "packed_hnd"]),
        block_size=st.sampled_from([8, 16, 24]),
    )
)
def test_every_configuration_is_spelled_as_it_is_read(made: Configuration) -> None:
    assert Configuration.parse(str(made)) == made


@given(st.sampled_from(sorted(PRESETS)), st.data())
def test_a_damaged_config_json_is_read_or_explained(name: str, data: st.DataObject) -> None:
    config = copy.deepcopy(dict(PRESETS[name].config))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        value = data.draw(JUNK)
        if data.draw(st.booleans()):
            config.pop(key, None)
        else:
            config[key] = value
    try:
        table = from_hf_config(config)
    except SpecError as error:
        assert str(error)
        return
    assert isinstance(table, LayerTable) and len(table) < 20_000


@given(st.lists(WORDS, max_size=6).map("".join), st.lists(st.text(max_size=8), max_size=3))
def test_the_nearest_word_is_one_of_the_choices_or_none(word: str, choices: list[str]) -> None:
    assert nearest(word, choices) in {"", *choices}


OPTIONS = (
    "--tp --dcp --pcp --interleave --rank --kv-heads --head-size --head-size-v --mla-row "
    "--block-size --layout --family --dtype --pcp-mode"
).split()
VALUES = st.one_of(
    st.integers(-2, 40).map(str),
    st.sampled_from(["mla", "split_nhd", "cpu_hnd", "nhd_planar_scales", "universal", "fp8", "1k"]),
    st.text(alphabet="abc-=,", max_size=4),
)


@given(st.lists(st.tuples(st.sampled_from(OPTIONS), VALUES), max_size=5))
def test_mapping_answers_any_mix_of_options(pairs: list[tuple[str, str]]) -> None:
    line = [f"{option}={value}" for option, value in pairs]
    assert main(["mapping", "--json", *line]) in (0, 1, 2), line


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "NaN", '"x"', "1" * 5000, "\x00", ""]
)
def test_hostile_json_is_a_sentence(
    text: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    line = ["explain", str(file), "--from", "tp=1", "--to", "tp=1", "--json"]
    assert main(line) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"]["exit_code"] == 2
