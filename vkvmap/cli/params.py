"""Options that several commands share, and types whose complaints name the nearest right value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vkvmap.configuration import ATTENTION_LAYOUTS, Configuration, ConfigurationError
from vkvmap.foreign import read_json
from vkvmap.identity import Identity
from vkvmap.models import KV_DTYPES, ModelError, load_model, preset_named
from vkvmap.nearest import nearest
from vkvmap.paged import layout_for
from vkvmap.sharing import FamilyChoice, decide, span_tokens
from vkvmap.spec import LayerTable

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # generic since click 8.4, at run time only there
else:
    ParamType = click.ParamType

Command = TypeVar("Command", bound=Callable[..., Any])


class OneOf(ParamType):
    """A choice that answers a wrong value with the nearest right one."""

    name = "choice"

    def __init__(self, choices: Iterable[str], metavar: str | None = None) -> None:
        self.choices = tuple(choices)
        self.shown = metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.shown or "[" + "|".join(self.choices) + "]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip().lower()
        if text in self.choices:
            return text
        close = nearest(text, self.choices, cutoff=0.3)
        hint = f"; did you mean {close!r}?" if close else ""
        self.fail(f"{value!r} is not one of {', '.join(self.choices)}{hint}", param, ctx)


class Positive(ParamType):
    """A positive integer, with ``k`` for thousands of 1024 allowed (``8k``)."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        scale = 1024 if text.endswith("k") else 1
        try:
            number = int(text.removesuffix("k")) * scale
        except ValueError:
            self.fail(f"{value!r} is not a whole number; write for example 16 or 8k", param, ctx)
        if number < 1:
            self.fail(f"{number} must be at least 1; nearest right value: 1", param, ctx)
        return number


class Spelled(ParamType):
    """A spelled configuration; it is read by `configuration` once the other options are known."""

    name = "CONFIG"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


class Setting(ParamType):
    """``KEY=VALUE`` for a field of a config.json; VALUE is JSON where it can be, else text."""

    name = "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE; write for example head_dim=128", param, ctx)
        try:
            return key, read_json(text)
        except ValueError:
            return key, text


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several option decorators as one, in the order in which help lists them."""

    def apply(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

MODEL = click.argument("model", metavar="MODEL")

MODEL_OPTIONS = options(
    click.option(
        "--kv-dtype",
        type=OneOf(("auto", *KV_DTYPES), "NAME"),
        default="auto",
        show_default=True,
        help=f"What the cache is kept in: auto (the model's dtype), {', '.join(KV_DTYPES)}.",
    ),
    click.option(
        "--set",
        "settings",
        type=Setting(),
        multiple=True,
        help="Add or replace a field of the config.json (repeatable); VALUE is JSON. "
        "model_type=llama reads an unknown architecture as plain attention.",
    ),
)

LAYOUT_OPTIONS = options(
    click.option(
        "--layout",
        type=OneOf(ATTENTION_LAYOUTS, "NAME"),
        default="packed_nhd",
        show_default=True,
        help="Layout of attention layers where a CONFIG names none: "
        f"{', '.join(ATTENTION_LAYOUTS)}.",
    ),
    click.option(
        "--block-size",
        type=Positive(),
        default=16,
        show_default=True,
        help="Tokens per block where a CONFIG names none.",
    ),
    click.option(
        "--pcp-mode",
        type=OneOf(("shards", "replicates")),
        default="shards",
        show_default=True,
        help="Whether prefill-context-parallel ranks hold parts of the tokens or replicas.",
    ),
)

CONFIG_HELP = (
    "tp=,dcp=,pcp=,pp=,interleave=,layout=,block= in any order, defaults left out; "
    "pp takes a count or layers per stage (pp=10+12+10)."
)


def model_table(model: str, kv_dtype: str, settings: Iterable[tuple[str, Any]]) -> LayerTable:
    """The layers of MODEL; complaints name the argument or option that is wrong."""
    try:
        return load_model(model, kv_dtype=kv_dtype, overrides=dict(settings))
    except ModelError as error:
        text = str(error)
        if text.startswith("kv dtype") or "kv dtype" in text.partition(";")[0]:
            raise click.BadParameter(text, param_hint="'--kv-dtype'") from None
        if error.fields:
            first = error.fields[0]
            text += f" (on the command line: --set {first}=VALUE)"
        elif preset_named(model) is None:
            text += " (see: vkvmap models)"
        raise click.BadParameter(text, param_hint="'MODEL'") from None


def configuration(
    option: str, text: str, layout: str, block_size: int, pcp_mode: Any
) -> Configuration:
    """Read a spelled configuration; complaints name `option`."""
    try:
        return Configuration.parse(text, layout=layout, block_size=block_size, pcp_mode=pcp_mode)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from None


def check_stages(option: str, side: Configuration, layers: LayerTable) -> None:
    """Pipeline stages must be stages of `layers`; complaints name `option`."""
    try:
        side.stage_layers(layers)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from None


# ---- a model and one or two configurations ------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """MODEL under ``--from`` and, where it was given, ``--to``."""

    model: str
    layers: LayerTable
    sides: tuple[Configuration, ...]
    family: FamilyChoice

    @property
    def most_ranks(self) -> int:
        """Ranks of a stage of the larger side."""
        return max(side.grid.size for side in self.sides)

    def check_stages(self, layers: LayerTable | None = None) -> None:
        """Complain about stages that `layers` (default: the model's) cannot have."""
        for option, side in zip(("--from", "--to"), self.sides, strict=False):
            check_stages(option, side, self.layers if layers is None else layers)


def move_options(*, to_required: bool = True) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """MODEL, ``--from``, ``--to`` and what goes with them; the command gets a `Move` first."""
    target = "Target" if to_required else "Target beside it"
    declared = options(
        MODEL,
        click.option(
            "--from", "source", type=Spelled(), required=True, help=f"Source: {CONFIG_HELP}"
        ),
        click.option(
            "--to", "target", type=Spelled(), required=to_required, help=f"{target}, spelled alike."
        ),
        LAYOUT_OPTIONS,
        MODEL_OPTIONS,
        click.option(
            "--family",
            type=OneOf(("auto", "native", "universal")),
            default="auto",
            show_default=True,
            help="Byte order of canonical pages; auto takes native where both sides can share it.",
        ),
    )

    def apply(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def run(
            model: str,
            source: str,
            target: str | None,
            layout: str,
            block_size: int,
            pcp_mode: str,
            kv_dtype: str,
            settings: tuple[tuple[str, Any], ...],
            family: FamilyChoice,
            **rest: Any,
        ) -> int:
            layers = model_table(model, kv_dtype, settings)
            given = [("--from", source), *([] if target is None else [("--to", target)])]
            sides = tuple(configuration(o, text, layout, block_size, pcp_mode) for o, text in given)
            return command(Move(model, layers, sides, family), **rest)

        return declared(run)

    return apply


# ---- what pages are stored under ----------------------------------------------------------------


identity_options = options(
    click.option(
        "--revision",
        required=True,
        help="The exact checkpoint (a commit or a digest): two revisions are two models.",
    ),
    click.option(
        "--family",
        type=OneOf(("universal", "native")),
        default="universal",
        show_default=True,
        help="Byte order of the stored pages.",
    ),
    click.option("--adapter", help="Name and version of the adapter that was applied."),
    click.option("--salt", default="", help="Keeps tenants or experiments apart."),
    click.option("--chunk-tokens", type=Positive(), help="Tokens of a chunk; default: one page."),
)


def stored_identity(
    model: str,
    table: LayerTable,
    side: Configuration,
    *,
    chunk_tokens: int | None,
    revision: str,
    family: Any,
    adapter: str | None,
    salt: str,
) -> Identity:
    """The identity that pages of this deployment are stored under.

    A preset stores under the name of its checkpoint, a file under its own. Raises FormatError
    where chunks are not whole pages.
    """
    preset = preset_named(model)
    groups = {name: table.in_group(name) for name in table.groups}
    native = family == "native"
    return Identity(
        preset.checkpoint if preset is not None else model,
        revision,
        table,
        chunk_tokens or decide(table, [side]).chunk_tokens,
        family=family,
        adapter=adapter,
        salt=salt,
        layouts={spec.name: layout_for(spec, side.layout) for spec in table.values()}
        if native
        else None,
        spans={
            name: max(span_tokens(spec, side) for spec in specs) for name, specs in groups.items()
        }
        if native
        else None,
    )
