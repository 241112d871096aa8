"""Options: the ``vkvmap`` object inside ``kv_connector_extra_config``.

Spelling mistakes are refused: an option that is silently ignored is found in production.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from vkvmap.errors import VkvmapError
from vkvmap.mapping import Family
from vkvmap.nearest import nearest
from vkvmap.writers import POLICIES


class EngineError(VkvmapError, RuntimeError):
    """The engine cannot be served as configured; the message says what to change."""


Mover = Literal["auto", "host", "kernel", "copy_engine"]


@dataclass(frozen=True)
class Options:
    """What an operator may choose.

    Attributes:
        family: byte order of stored pages. ``"native"`` is the fastest and is shared between
            tensor-parallel sizes; ``"universal"`` is also shared between context-parallel sizes
            and page layouts.
        strict: refuse to start where a layer cannot be certified, instead of keeping its pages
            for this configuration alone.
        verify: store a digest per layer, KV head and token with every page and compare it after
            every load. For acceptance tests: it reads every page once more.
        mover: what carries bytes.
        writers: which replica stores (see `vkvmap.writers`).
        revision: names the exact checkpoint; by default it is worked out from the model's
            configuration and its files.
        salt: keeps tenants or experiments apart.
        retries: how often a transfer is repeated before it counts as failed.
    """

    family: Family = "native"
    strict: bool = False
    verify: bool = False
    mover: Mover = "auto"
    writers: str = "turns"
    revision: str | None = None
    salt: str = ""
    retries: int = 1

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Options:
        """The options in `extra_config`.

        Raises:
            EngineError: an unknown option, or a value that it cannot have.
        """
        given = extra_config.get("vkvmap", {})
        if not isinstance(given, Mapping):
            raise EngineError(f"option 'vkvmap' is {given!r}; it must be an object of options")
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                close = nearest(str(name), known)
                hint = f"; did you mean {close!r}?" if close else ""
                raise EngineError(
                    f"unknown option vkvmap.{name}; known are {', '.join(sorted(known))}{hint}"
                )
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        self._one_of("family", get_args(Family))
        self._one_of("mover", get_args(Mover))
        self._one_of("writers", tuple(POLICIES))
        for name in ("strict", "verify"):
            self._one_of(name, (True, False))
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise EngineError(f"option vkvmap.retries={self.retries!r}: a count is needed")
        for name in ("salt", "revision"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name == "revision")):
                raise EngineError(f"option vkvmap.{name}={value!r}: a string is needed")

    def _one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if not any(value is choice or value == choice for choice in choices) or isinstance(
            value, bool
        ) != isinstance(choices[0], bool):
            raise EngineError(
                f"option vkvmap.{name}={value!r}: choose one of "
                f"{', '.join(repr(choice) for choice in choices)}"
            )
