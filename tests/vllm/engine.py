"""Runs the real engine in processes of its own, one after the other, and reads what came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BYTES = 64 << 20


def python() -> str:
    """The interpreter that has the engine; without one the tests fail, they do not skip."""
    found = os.environ.get("VKVMAP_VLLM_PYTHON")
    if not found or not Path(found).exists():
        raise RuntimeError("set VKVMAP_VLLM_PYTHON, or run tests/vllm/run.sh, which makes one")
    return found


@dataclass
class Life:
    """What one engine process did.

    `passes[i][j]` is pass i of prompt j: tokens, prompt length, cached tokens.
    """

    passes: list[list[dict[str, Any]]]
    metrics: dict[str, float]
    log: str
    code: int

    def tokens(self, index: int = 0) -> list[list[int]]:
        return [entry["tokens"] for entry in self.passes[index]]

    def cached(self, index: int = 0) -> list[int]:
        return [entry["cached"] for entry in self.passes[index]]

    def metric(self, name: str) -> float:
        return self.metrics.get(f"vllm:{name}", 0.0)


def whole_prefix(life: Life, chunk_tokens: int, index: int = 0) -> list[int]:
    """Tokens of each prompt that a full hit covers: whole chunks before its last token."""
    return [(e["length"] - 1) // chunk_tokens * chunk_tokens for e in life.passes[index]]


@dataclass
class Bench:
    """Starts engines; `folder` is where their files go."""

    folder: Path
    lives: int = 0
    took: dict[str, float] = field(default_factory=dict)

    def start(self, model: Path, **task: Any) -> subprocess.Popen[str]:
        release = task.pop("release", None)
        environment = os.environ | {"PYTHONPATH": str(HERE), "VLLM_LOGGING_LEVEL": "INFO"}
        if release is not None:
            target = Path(python()).parents[1] / "releases" / release
            if target.exists():
                environment["PYTHONPATH"] = f"{target}:{HERE}"
        environment.update(task.pop("environment", {}))
        self.lives += 1
        file = self.folder / f"task-{self.lives}.json"
        file.write_text(json.dumps({"model": str(model), **task}), encoding="utf-8")
        return subprocess.Popen(
            [python(), str(HERE / "engine_run.py"), str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.folder,
            # A group, to be killed whole, but no session: Linux shares processors out by session,
            # and engine processes that yield in a loop can starve another session's for minutes,
            # the object store's among them.
            preexec_fn=os.setpgrp,
        )

    def run(self, model: Path, *, timeout: float = 300, fails: bool = False, **task: Any) -> Life:
        """One life. With `fails` it must end in an error, otherwise it must not."""
        started = time.monotonic()
        process = self.start(model, **task)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"no end after {timeout} s\n{output[-6000:]}") from None
        self.took[f"{self.lives} tp={task.get('tp', 1)}"] = time.monotonic() - started
        return self.read(process, output, fails=fails)

    def read(self, process: subprocess.Popen[str], output: str, *, fails: bool = False) -> Life:
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        if fails:
            assert process.returncode, f"it should have failed\n{output[-6000:]}"
            assert not lines, "tokens came out although it failed"
            return Life([], {}, output, process.returncode)
        assert lines and not process.returncode, (
            f"the engine ended with {process.returncode}\n{output[-6000:]}"
        )
        result = json.loads(lines[-1][len("RESULT ") :])
        return Life(result["passes"], result["metrics"], output, process.returncode)


def transfer(
    files: Path | None = None,
    *,
    blocks_per_chunk: int = 1,
    connector: bool = False,
    cpu_bytes: int = BYTES,
    tier: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A ``--kv-transfer-config``; `options` are vkvmap's, `files` the folder of a file tier."""
    extra: dict[str, Any] = {
        "spec_name": "VkvmapOffloadingSpec",
        "spec_module_path": "vkvmap.integrations.vllm",
        "cpu_bytes_to_use": cpu_bytes,
        "blocks_per_chunk": blocks_per_chunk,
    }
    if options:
        extra["vkvmap"] = options
    if files is not None:
        tier = {"type": "fs", "root_dir": str(files), "n_read_threads": 1, "n_write_threads": 1}
    if tier is not None:
        extra["secondary_tiers"] = [tier]
    chosen: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    if connector:
        chosen = {
            "kv_connector": "VkvmapConnector",
            "kv_connector_module_path": "vkvmap.integrations.vllm",
            "kv_load_failure_policy": "recompute",
        }
    return {**chosen, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def make_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A tiny model of `kind`, made by the engine's own libraries."""
    subprocess.run(
        [python(), str(HERE / "tiny_models.py"), str(folder), kind, str(seed)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if "-v" not in sys.argv else None,
    )
    return folder


def stored_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin"))
