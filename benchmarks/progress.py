"""What publishing progress per layer costs a load, and how much sooner attention can begin.

A load of all layers with and without progress words; with them, the caller watches for the first
layer, as an engine does before its first attention.

Prediction: a slice is at most 2 MiB either way, so the words cost a walk over layers instead of
classes and nothing per byte; the first of 80 layers arrives after little more than 1/80 of the load
and what the threads are at together.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, Samples, interleaved, parser, spread
from benchmarks.host_mover import MIB, World, world
from vkvmap.transfer import Engine


def measure(report: Report, here: World, rounds: int, threads: int) -> None:
    layers = len(here.caches)
    words = np.zeros(layers, np.uint32)
    pairs = (here.blocks, here.pages)
    first, all_layers = Samples(), Samples()

    def watched() -> None:
        words[:] = 0
        start = time.perf_counter()
        job = here.plan.load(pairs, progress=words)
        while not words[0]:
            time.sleep(20e-6)
        first.seconds.append(time.perf_counter() - start)
        job.check()
        all_layers.seconds.append(time.perf_counter() - start)
        assert words.all(), "a layer was not reported"

    taken = interleaved({"plain": here.load, "watched": watched}, rounds=rounds)
    what = f"load of {layers} layers, {here.nbytes // MIB} MiB, {threads} thread(s)"
    for name, slower, faster, note in (
        ("with progress", taken["watched"], taken["plain"], "of the time without"),
        ("until the last layer", all_layers, first, "of the time until the first"),
    ):
        low, ratio, high = spread(slower, faster)
        report.add(
            Result(f"{what}: {name}", slower.median * 1e3, "ms", faster.median * 1e3, ratio),
            f"{note} ({low:.2f}-{high:.2f})",
        )


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0] if __doc__ else "")
    options_parser.add_argument("--mib", type=int, default=256, help="cache size (%(default)s)")
    options_parser.add_argument("--layers", type=int, default=80, help="(%(default)s)")
    options = options_parser.parse_args()
    report = Report(options.json)
    for threads in (1, 2):
        engine = Engine(threads)
        with world(256, options.mib * MIB, options.layers, engine) as here:
            here.verify()
            measure(report, here, options.rounds, threads)
        engine.shutdown()
    report.write()


if __name__ == "__main__":
    main()
