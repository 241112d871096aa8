"""What an operator is told while the engine starts."""

from __future__ import annotations

from typing import Any

from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.options import Options
from vkvmap.integrations.vllm.setup import Setup

# The engine shows its own loggers only.
logger: Any = versions.find("vllm.logger", "init_logger")("vllm.vkvmap")


def log_setup(setup: Setup, options: Options) -> None:
    """Certified, opaque and why, bytes per token, namespace: once per engine."""
    if setup.rank != 0:
        return
    layers = len(setup.mappings.by_layer)
    logger.info(
        "vkvmap: %s of %s layers certified (%s family), %s bytes per token, name %s (%s)",
        setup.certified,
        layers,
        options.family,
        f"{setup.bytes_per_token:,}",
        setup.identity.name[:12],
        "shared with other parallel configurations"
        if setup.shared
        else "kept for this parallel configuration alone",
    )
    told: dict[tuple[str, str, str], list[str]] = {}
    for refusal in setup.reasons:
        told.setdefault((refusal.rule, refusal.seen, refusal.remedy), []).append(refusal.layer)
    for (rule, seen, remedy), names in told.items():
        which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        logger.warning("vkvmap: %s opaque: %s: %s; %s", which, rule, seen, remedy)
    if setup.random_keys:
        logger.warning(
            "vkvmap: this engine seeds its block hashes anew at every start, so no other can "
            "find its pages; set PYTHONHASHSEED to one number everywhere"
        )
    for sentence in setup.disagreements:
        logger.warning("vkvmap: the engine's own mapping differs: %s", sentence)
