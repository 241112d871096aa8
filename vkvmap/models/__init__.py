"""Real models as layer tables: from a `config.json`, or from a preset with its published shape.

>>> from vkvmap.models import load_model
>>> table = load_model("gpt-oss-120b")
>>> table.groups
('window-128', 'full')
>>> table["model.layers.1.attn.attn"].num_kv_heads
8

What must stay true: nothing is guessed. A field that decides the cache and is missing is named, and
an architecture that is not known is refused, with what it would take to read it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vkvmap.foreign import read_json
from vkvmap.models.config import KV_DTYPES, Config, KvDtype, ModelError
from vkvmap.models.defaults import filled
from vkvmap.models.families import FAMILIES
from vkvmap.models.presets import PRESETS, Preset
from vkvmap.nearest import nearest
from vkvmap.spec import LayerTable

__all__ = [
    "FAMILIES",
    "KV_DTYPES",
    "PRESETS",
    "KvDtype",
    "ModelError",
    "Preset",
    "from_hf_config",
    "load_model",
    "preset_named",
]

#: What a reader stumbles over where a field is no list, number or name although it must be one.
_CONTRADICTIONS = (TypeError, AttributeError, LookupError, ArithmeticError)

#: Where multimodal configurations keep their language model.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def from_hf_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    kv_dtype: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    prefix: str = "model.layers",
) -> LayerTable:
    """The layers of a Hugging Face configuration that cache something, in model order.

    Args:
        source: a `config.json`, a folder that holds one, or its parsed content.
        kv_dtype: a name of `KV_DTYPES`; ``"auto"`` takes the model's own dtype. State layers keep
            the dtypes that the configuration gives them.
        overrides: fields to add or replace, ``model_type`` included: how an architecture that is
            not known is read as one that is.
        prefix: what the engine puts before a layer's number in its names.

    Returns:
        The whole model's layer table; draft (multi-token prediction) layers are not in it.

    Raises:
        ModelError: unreadable file, unknown architecture or kv dtype, a needed field is missing
            or impossible. `ModelError.fields` names the fields.
    """
    values = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    language = _language_model(values)
    language.update(overrides or {})
    values = filled(language, nested=_is_nested(values))
    family = str(values.get("model_type"))
    if family not in FAMILIES:
        raise _unknown(family)
    kv = _kv_dtype(kv_dtype, values)
    config = Config(values, kv, prefix)
    try:
        layers = list(FAMILIES[family](config))
    except _CONTRADICTIONS as error:
        raise ModelError(
            f"model_type {family!r}: the configuration has a field of a kind that it cannot have "
            f"({type(error).__name__}: {error}); compare it with the publisher's config.json"
        ) from error
    if not layers:
        raise ModelError(f"model_type {family!r}: no layer of this configuration caches anything")
    return LayerTable(layers)


def preset_named(model: str | os.PathLike[str]) -> Preset | None:
    """The preset of that name, or of that checkpoint where no such path exists."""
    name = os.fspath(model).lower()
    if name in PRESETS or os.path.exists(os.fspath(model)):
        return PRESETS.get(name)
    same = (preset for preset in PRESETS.values() if preset.checkpoint.lower() == name)
    return next(same, None)


def load_model(
    model: str | os.PathLike[str],
    *,
    kv_dtype: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    prefix: str = "model.layers",
) -> LayerTable:
    """A preset by its name or checkpoint, else the configuration at a path, by `from_hf_config`.

    ``"auto"`` takes the dtype that a preset is named for (``deepseek-v3-fp8``) where it has one.
    """
    name = os.fspath(model)
    preset = preset_named(name)
    if preset is not None:
        chosen = preset.kv_dtype if kv_dtype == "auto" else kv_dtype
        return from_hf_config(preset.config, kv_dtype=chosen, overrides=overrides, prefix=prefix)
    if not os.path.exists(name):
        close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"; nearest presets: {', '.join(close)}" if close else ""
        raise ModelError(f"{name!r} is neither a preset nor a file or folder that exists{hint}")
    return from_hf_config(name, kv_dtype=kv_dtype, overrides=overrides, prefix=prefix)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = read_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {str(file)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{str(file)!r} holds a {type(content).__name__}, a config.json an object")
    return content


def _language_model(values: dict[str, Any]) -> dict[str, Any]:
    """The text part of a multimodal configuration, with what only the outside says."""
    for key in _TEXT:
        inner = values.get(key)
        if isinstance(inner, Mapping):
            outside = {k: v for k, v in values.items() if k not in _TEXT}
            merged = {**outside, **_language_model(dict(inner))}
            ours, theirs = (str(each.get("model_type")) for each in (merged, outside))
            if ours not in FAMILIES and theirs in FAMILIES:
                merged["model_type"] = outside["model_type"]
            return merged
    return values


def _is_nested(values: Mapping[str, Any]) -> bool:
    return any(isinstance(values.get(key), Mapping) for key in _TEXT)


def _unknown(family: Any) -> ModelError:
    close = nearest(str(family), FAMILIES, cutoff=0.6)
    hint = f" (nearest: {close!r})" if close else ""
    fields = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    return ModelError(
        f"model_type {family!r} is not known{hint}. If its layers are plain attention, read it as "
        f"model_type='llama' with {', '.join(fields)}; if they keep MLA rows, as 'deepseek_v3' "
        "with num_hidden_layers, kv_lora_rank, qk_rope_head_dim. Known ones are in FAMILIES, and "
        "at the end of `vkvmap models`",
        ("model_type", *fields),
    )


def _kv_dtype(name: str, values: Mapping[str, Any]) -> KvDtype:
    chosen = name
    if name == "auto":
        model_dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
        chosen = str(model_dtype).removeprefix("torch.")
    if chosen in KV_DTYPES:
        return KV_DTYPES[chosen]
    close = nearest(chosen, KV_DTYPES)
    hint = f"; did you mean {close!r}?" if close else ""
    raise ModelError(f"kv dtype {chosen!r} is not one of auto, {', '.join(KV_DTYPES)}{hint}")
