"""One life of the real engine, in a process of its own: ``python engine_run.py TASK.json``.

Starts vLLM on the CPU as the task says, generates greedily, and prints one line of JSON that begins
with ``RESULT``: per pass and prompt the tokens, the prompt's length and how much of it was cached,
and the engine's metrics at the end. Everything else on stdout and stderr is the engine's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Where the Python of a release for GPUs runs over binaries for the CPU.
    "VLLM_TARGET_DEVICE": "cpu",
    "PYTHONHASHSEED": "0",
}

BASE = "The quick brown fox jumps over the lazy dog and then some more text follows. " * 4
PROMPTS = [BASE + "first", "ZYX " + BASE[:240], "second request: " + BASE[10:260]]

#: Where the engine's releases keep jobs that have not ended.
JOBS = ("_jobs", "_transfer_jobs")


def main(task: dict[str, Any]) -> None:
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    if task.get("patch"):
        getattr(__import__("sabotage"), task["patch"])()
    from vllm import LLM, SamplingParams

    keywords: dict[str, Any] = {
        "model": task["model"],
        "enforce_eager": True,
        "dtype": task.get("dtype", "float32"),
        "block_size": 32,
        "max_model_len": 1024,
        "disable_log_stats": False,
        "tensor_parallel_size": task.get("tp", 1),
    }
    if task.get("tp", 1) > 1:
        keywords["distributed_executor_backend"] = "mp"
    if task.get("transfer"):
        keywords["kv_transfer_config"] = task["transfer"]
    keywords.update(task.get("engine", {}))
    llm = LLM(**keywords)
    plain = {"max_tokens": task.get("tokens", 12), "temperature": 0, "ignore_eos": True}
    wanted = {"kv_transfer_params": task["request"]} if task.get("request") else None
    greedy = SamplingParams(**plain, extra_args=wanted)
    passes = []
    prompts = task.get("prompts", PROMPTS)
    for index in range(task.get("passes", 1)):
        if index and task.get("kill_worker"):
            kill_worker()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        passes.append(
            [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "length": len(output.prompt_token_ids),
                    "cached": output.num_cached_tokens,
                }
                for output in outputs
            ]
        )
        # A store is submitted at the start of the step after; give it one, then forget the cache.
        llm.generate(["tail"], SamplingParams(**plain), use_tqdm=False)
        llm.reset_prefix_cache()
        if task.get("sleep"):
            llm.sleep(level=task["sleep"])
            llm.wake_up()
    # An engine that ends while a tier still writes takes the memory that the tier reads.
    settled = time.monotonic() + 120
    while busy(llm):
        if time.monotonic() > settled:
            raise TimeoutError("the tiers have not finished after 120 s")
        llm.llm_engine.step()
        time.sleep(0.02)
    metrics = read(llm)
    print("RESULT " + json.dumps({"passes": passes, "metrics": metrics}), flush=True)
    if task.get("until"):
        # Stay, for a peer, until a file of this name is there; without steps nobody is answered.
        while not Path(task["until"]).exists():
            llm.llm_engine.step()
            time.sleep(0.02)
    if task.get("exit_at_once"):
        llm.llm_engine.engine_core.shutdown()
        os._exit(0)


def busy(llm: Any) -> bool:
    """Whether a job of the connector or of a tier is on its way, and steps still move it on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    connector = getattr(scheduler.connector, "connector_scheduler", None)
    manager = getattr(connector, "manager", None)
    jobs = [getattr(part, name, None) for part in (connector, manager) for name in JOBS]
    return any(jobs) and bool(scheduler.has_requests())


def read(llm: Any) -> dict[str, float]:
    """The engine's metrics about offloading, each named with its direction or tier."""
    metrics = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None and ("offload" in metric.name or "vkvmap" in metric.name):
            labels = ",".join(
                v for k, v in sorted(metric.labels.items()) if k in ("direction", "tier")
            )
            metrics[f"{metric.name}{{{labels}}}" if labels else metric.name] = value
    return metrics


def kill_worker() -> None:
    """Kill the last of this engine's workers without warning."""
    os.kill(multiprocessing.active_children()[-1].pid or 0, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
