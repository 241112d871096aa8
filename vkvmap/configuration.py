"""One side of a move: how a deployment is spelled, and what it means for pages.

``tp=8,dcp=2,pcp=1,pp=2,interleave=1,layout=split_nhd,block=16`` in any order, with everything but
what differs from the defaults left out. Pipeline stages are counted (``pp=4``) or given by their
layers (``pp=10+12+10``); they own whole layers and are worker groups of their own.

Every complaint names the key, the value, the rule and the nearest right value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from vkvmap.errors import SpecError
from vkvmap.grid import PcpMode, RankGrid
from vkvmap.layout import LAYOUTS
from vkvmap.nearest import nearest
from vkvmap.spec import LayerTable

KEYS = ("tp", "dcp", "pcp", "pp", "interleave", "layout", "block")

#: Layouts that a whole model can be declared in: the ones attention layers are kept in. Latent
#: rows, index keys and recurrent state have layouts of their own.
ATTENTION_LAYOUTS = tuple(
    name for name in LAYOUTS if name not in ("mla", "planar", "state", "pages", "head_spans")
)

_MOST_RANKS = 1024


class ConfigurationError(SpecError):
    """A spelled configuration is wrong: `key`, `value`, the `rule`, the `nearest` right value."""

    def __init__(self, key: str, value: object, rule: str, nearest: str = "") -> None:
        hint = f"; nearest right value: {nearest}" if nearest else ""
        super().__init__(f"{key}={value}: {rule}{hint}" if value != "" else f"{key}: {rule}{hint}")
        self.key, self.value, self.rule, self.nearest = key, str(value), rule, nearest


@dataclass(frozen=True)
class Configuration:
    """A parallel configuration with its cache layout and block size.

    Attributes:
        stages: layers per pipeline stage where they were given, else None for `pp` even stages.
        layout: layout of attention layers.
        block_size: tokens per block on one rank.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    pp: int = 1
    stages: tuple[int, ...] | None = None
    interleave: int = 1
    layout: str = "packed_nhd"
    block_size: int = 16
    pcp_mode: PcpMode = "shards"

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        layout: str = "packed_nhd",
        block_size: int = 16,
        pcp_mode: PcpMode = "shards",
    ) -> Configuration:
        """Read a spelled configuration; the keywords give what it leaves out.

        Raises ConfigurationError.
        """
        given: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (piece.strip() for piece in item.partition("="))
            if not equals and (split := _unspelled(key)):
                rule = "a configuration is KEY=VALUE pairs with commas between them"
                raise ConfigurationError(key, "", rule, "=".join(split))
            if key not in KEYS:
                raise ConfigurationError(
                    key,
                    value,
                    f"not a key of a configuration ({', '.join(KEYS)})",
                    nearest(key, KEYS),
                )
            if not equals or not value:
                raise ConfigurationError(key, value, "needs a value", f"{key}=1")
            if key in given:
                raise ConfigurationError(key, value, f"is given twice, {given[key]} before")
            given[key] = value
        pp, stages = _stages(given.pop("pp", "1"))
        chosen = given.pop("layout", layout)
        if chosen not in ATTENTION_LAYOUTS:
            raise ConfigurationError(
                "layout",
                chosen,
                f"not a layout ({', '.join(ATTENTION_LAYOUTS)})",
                nearest(chosen, ATTENTION_LAYOUTS, cutoff=0.3),
            )
        block = _positive("block", given.pop("block", str(block_size)))
        numbers = {key: _positive(key, value) for key, value in given.items()}
        made = cls(
            pp=pp,
            stages=stages,
            layout=chosen,
            block_size=block,
            pcp_mode=pcp_mode,
            **numbers,
        )
        made._check()
        return made

    def _check(self) -> None:
        if self.ranks > _MOST_RANKS:
            raise ConfigurationError(
                "tp", self.tp, f"{self.ranks} ranks, more than {_MOST_RANKS}", "tp=8"
            )
        if self.pcp_mode == "shards" and self.tp % self.dcp:
            raise ConfigurationError(
                "dcp",
                self.dcp,
                f"DCP is laid over the TP ranks and must divide tp={self.tp}",
                f"dcp={gcd(self.dcp, self.tp)}",
            )
        if self.shards > 1 and self.block_size % self.interleave:
            raise ConfigurationError(
                "interleave",
                self.interleave,
                f"must divide the block of {self.block_size} tokens",
                f"interleave={gcd(self.interleave, self.block_size)}",
            )

    @property
    def grid(self) -> RankGrid:
        """The rank grid of one pipeline stage."""
        return RankGrid(
            tp=self.tp,
            dcp=self.dcp,
            pcp=self.pcp,
            interleave=self.interleave,
            pcp_mode=self.pcp_mode,
        )

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.pp * self.tp * self.pcp

    @property
    def shards(self) -> int:
        """Context shards of layers that DCP cuts."""
        return self.dcp * self.pcp if self.pcp_mode == "shards" else self.dcp

    @property
    def span(self) -> int:
        """Tokens of a canonical page of layers that DCP cuts."""
        return self.block_size * self.shards

    def stage_layers(self, table: LayerTable) -> tuple[tuple[str, ...], ...]:
        """Layer names of every stage, in order; stages own runs of decoder layers.

        Raises ConfigurationError where the stages do not add up to the model.
        """
        owners = decoder_layers(table)
        counts = self.stages
        if counts is None:
            if self.pp > len(owners):
                raise ConfigurationError(
                    "pp", self.pp, f"the model has {len(owners)} layers", f"pp={len(owners)}"
                )
            base, more = divmod(len(owners), self.pp)
            counts = tuple(base + (i < more) for i in range(self.pp))
        if sum(counts) != len(owners):
            closest = (*counts[:-1], len(owners) - sum(counts[:-1]))
            hint = "+".join(map(str, closest)) if closest[-1] > 0 else str(self.pp)
            raise ConfigurationError(
                "pp",
                "+".join(map(str, counts)),
                f"the stages have {sum(counts)} layers, the model has {len(owners)}",
                f"pp={hint}",
            )
        stages, first = [], 0
        for count in counts:
            names = [name for group in owners[first : first + count] for name in group]
            stages.append(tuple(names))
            first += count
        return tuple(stages)

    def __str__(self) -> str:
        stages = "+".join(map(str, self.stages)) if self.stages else str(self.pp)
        sizes = {
            "tp": self.tp,
            "dcp": self.dcp,
            "pcp": self.pcp,
            "pp": stages,
            "interleave": self.interleave,
        }
        parts = [f"{key}={value}" for key, value in sizes.items() if value not in (1, "1")]
        return ",".join([*(parts or ["tp=1"]), f"layout={self.layout}", f"block={self.block_size}"])


def decoder_layers(table: LayerTable) -> list[tuple[str, ...]]:
    """Layer names by the decoder layer that they are part of, which no pipeline stage splits.

    Layers belong together that share the number in their name; names without one stand alone.
    """
    owners: dict[str, list[str]] = {}
    for name in table:
        number = next((part for part in name.split(".") if part.isdigit()), name)
        owners.setdefault(number, []).append(name)
    return [tuple(names) for names in owners.values()]


def _positive(key: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigurationError(key, value, "must be a positive integer", f"{key}=1") from None
    if number < 1:
        raise ConfigurationError(key, value, "must be a positive integer", f"{key}=1")
    return number


def _unspelled(item: str) -> tuple[str, str] | None:
    """``("tp", "8")`` for ``tp8``."""
    key = item.rstrip("0123456789")
    return (key, item[len(key) :]) if key in KEYS and key != item else None


def _stages(value: str) -> tuple[int, tuple[int, ...] | None]:
    counts: Sequence[int] = [_positive("pp", part) for part in value.split("+")]
    if len(counts) == 1:
        return counts[0], None
    return len(counts), tuple(counts)
