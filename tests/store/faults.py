"""Everything that can happen to a store, on purpose: kills, power losses, flipped bits, crowds.

Each function does one kind of harm `rounds` times and returns counts; a wrong byte, a leak or a
store that does not open raises. The suite runs short versions; the longer command is

    python -m tests.store.faults kill|power|damage|crowd [--rounds N | --seconds N]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from tests.store.small import aligned, content_of, key_of, payload_bytes, small_identity
from vkvmap.region import Region, Section
from vkvmap.store import CanonicalStore
from vkvmap.store_files import FileSystem
from vkvmap.store_upkeep import fsck, gc, ls, stats

IDENTITY = small_identity()
FULL = payload_bytes(IDENTITY, "full")
FILE = 4096 + -(-FULL // 4096) * 4096


class WrongBytesError(AssertionError):
    """A store served what it must not have."""


def serve_all(store: CanonicalStore, numbers: range) -> Counter[str]:
    """Get every key; compare every hit with the one right content."""
    keys = [key_of(number) for number in numbers]
    rows = [aligned(FULL, 0x5A) for _ in keys]
    job = store.get(keys, "full", rows)
    if not job.wait(60):
        raise WrongBytesError("a store did not answer within a minute")
    for key, row, outcome in zip(keys, rows, job.outcomes, strict=True):
        if outcome == "hit" and not np.array_equal(row, content_of(key, FULL)):
            raise WrongBytesError(f"wrong bytes served for {key.hex()}")
    return Counter(job.outcomes)


# ---- kill -9 ----------------------------------------------------------------------------------


class KillingFileSystem(FileSystem):
    """Kills its own process at the `fatal`-th step; half of the writes are torn first."""

    def __init__(self, fatal: int, tear: int) -> None:
        self.fatal = fatal
        self.tear = tear
        self.lock = threading.Lock()

    def step(self) -> bool:
        with self.lock:
            self.fatal -= 1
            return self.fatal == 0

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)

    def around(self, call, *arguments):
        if self.step():
            self.die()
        result = call(*arguments)
        if self.step():
            self.die()
        return result

    def open(self, path, flags):
        return self.around(super().open, path, flags)

    def writev(self, fd, buffers, offset):
        if self.step():
            joined = b"".join(bytes(buffer) for buffer in buffers)
            with suppress(OSError):  # direct I/O takes whole pages only
                half = aligned(len(joined) // 4096 * 4096)
                half[:] = np.frombuffer(joined, np.uint8)[: half.nbytes]
                os.pwrite(fd, half[: self.tear % (half.nbytes // 4096 + 1) * 4096].data, offset)
            self.die()
        return self.around(super().writev, fd, buffers, offset)

    def sync(self, fd):
        self.around(super().sync, fd)

    def rename(self, source, target):
        self.around(super().rename, source, target)

    def unlink(self, path):
        self.around(super().unlink, path)

    def close(self, fd):
        self.around(super().close, fd)


def writer(path: str, region_path: str, seed: int, files: FileSystem | None) -> None:
    """What the process that gets killed does; never returns."""
    chance = random.Random(seed)
    with suppress(OSError):
        region = Region.create(
            [Section("full", 4, FULL)],
            backing="file",
            path=region_path,
            joiners=chance.choice([1, 2]),
            populate_threads=0,
        )
        Region.attach(region_path)
        region.row("full", 0)[:] = 1
    sync = chance.choice(["none", "data"])
    store = CanonicalStore(path, IDENTITY, files=files, capacity=24 * FILE, threads=2, sync=sync)
    while True:
        numbers = [chance.randrange(60) for _ in range(3)]
        keys = [key_of(number) for number in numbers]
        store.put(keys, "full", [content_of(key, FULL) for key in keys]).wait(30)
        store.get(keys, "full", [aligned(FULL) for _ in keys]).wait(30)


def kill(rounds: int, seed: int = 0) -> Counter[str]:
    """Kill a writer at `rounds` random points, half by the clock and half by the system call."""
    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    folder = tempfile.mkdtemp(prefix="vkvmap-kill-")
    path, region_path = f"{folder}/store", f"{folder}/region"
    try:
        for round_ in range(rounds):
            by_clock = round_ % 2 == 0
            fatal = None if by_clock else KillingFileSystem(chance.randrange(1, 120), round_)
            pid = os.fork()
            if pid == 0:
                try:
                    writer(path, region_path, chance.randrange(1 << 30), fatal)
                finally:
                    os._exit(1)
            if by_clock:
                time.sleep(chance.random() * 0.03)
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(status):
                raise WrongBytesError(f"round {round_}: the writer ended by itself ({status})")
            totals["kills"] += 1
            with CanonicalStore(path, IDENTITY, capacity=24 * FILE) as store:
                outcomes = serve_all(store, range(60))
                totals.update(outcomes)
                if outcomes["damaged"] or outcomes["failed"]:
                    raise WrongBytesError(f"round {round_}: {outcomes}")
                used = store.snapshot()["used_bytes"]
            gc(path)
            after = stats(path)
            if after.temporaries or after.used != after.nbytes or used < after.nbytes:
                raise WrongBytesError(f"round {round_}: a leak: {after}")
            if after.nbytes > 24 * FILE:
                raise WrongBytesError(f"round {round_}: {after.nbytes} bytes exceed the capacity")
            Region.sweep(region_path)
            if os.listdir(folder) != ["store"]:
                raise WrongBytesError(f"round {round_}: leaked {os.listdir(folder)}")
        if not fsck(path).clean:
            raise WrongBytesError("fsck finds damage")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return totals


# ---- power loss -------------------------------------------------------------------------------


@dataclass
class RecordingFileSystem(FileSystem):
    """Notes in which order bytes and names change, so that a loss of power can be played later."""

    root: str
    log: list[tuple] = field(default_factory=list)
    inodes: dict[int, int] = field(default_factory=dict)
    fresh: itertools.count[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, *event) -> None:
        with self.lock:
            self.log.append(event)

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def open(self, path, flags):
        fd = super().open(path, flags)
        if flags & os.O_CREAT:
            self.inodes[fd] = next(self.fresh)  # the kernel reuses the numbers of removed files
            self.note("name", self.relative(path), self.inodes[fd])
        return fd

    def writev(self, fd, buffers, offset):
        done = super().writev(fd, buffers, offset)
        joined = b"".join(bytes(buffer) for buffer in buffers)[:done]
        self.note("write", self.inodes[fd], offset, joined)
        return done

    def sync(self, fd):
        super().sync(fd)
        self.note("sync", self.inodes[fd])

    def sync_directory(self, path):
        super().sync_directory(path)
        self.note("sync_directory", self.relative(path))

    def rename(self, source, target):
        super().rename(source, target)
        self.note("rename", self.relative(source), self.relative(target))

    def unlink(self, path):
        super().unlink(path)
        self.note("unlink", self.relative(path))


def after_power_loss(log: list[tuple], at: int, chance: random.Random) -> dict[str, bytes]:
    """One state that the medium may be in: unsynced writes are dropped, torn or kept at random.

    Names change in order and are lost from some point on, but never before what was synced: what a
    journal promises.
    """
    happened = log[:at]
    last_sync: dict[int, int] = {}
    names_kept = 0
    for index, event in enumerate(happened):
        if event[0] == "sync":
            last_sync[event[1]] = index
        if event[0] == "sync_directory":
            names_kept = index
    names_lost_from = chance.randint(names_kept, len(happened))
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    for index, event in enumerate(happened):
        if event[0] == "write":
            _, inode, offset, data = event
            content = contents.setdefault(inode, bytearray())
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            if index < last_sync.get(inode, -1):
                content[offset : offset + len(data)] = data
            else:
                for sector in range(0, len(data), 512):
                    if chance.random() < 0.5:
                        piece = data[sector : sector + 512]
                        content[offset + sector : offset + sector + len(piece)] = piece
        elif index < names_lost_from:
            if event[0] == "name":
                names[event[1]] = event[2]
            elif event[0] == "rename" and event[1] in names:
                names[event[2]] = names.pop(event[1])
            elif event[0] == "unlink":
                names.pop(event[1], None)
    return {name: bytes(contents.get(inode, b"")) for name, inode in names.items()}


def power(rounds: int, seed: int = 0) -> Counter[str]:
    """Lose power at `rounds` random moments of a recorded run, under each sync policy."""
    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    for sync in ("none", "data", "full"):
        folder = tempfile.mkdtemp(prefix="vkvmap-power-")
        try:
            path = f"{folder}/store"
            files = RecordingFileSystem(path)
            reported: dict[int, int] = {}
            with CanonicalStore(
                path, IDENTITY, files=files, capacity=30 * FILE, threads=1, sync=sync
            ) as store:
                for number in range(50):
                    key = key_of(number)
                    store.put([key], "full", [content_of(key, FULL)]).wait(30)
                    reported[number] = len(files.log)
            for round_ in range(rounds // 3):
                at = chance.randrange(len(files.log) + 1)
                lost = f"{folder}/{round_}"
                for name, content in after_power_loss(files.log, at, chance).items():
                    os.makedirs(os.path.dirname(f"{lost}/{name}"), exist_ok=True)
                    with open(f"{lost}/{name}", "wb") as file:
                        file.write(content)
                os.makedirs(lost, exist_ok=True)
                with open(f"{lost}/state", "wb") as file:
                    file.write(chance.choice([b"", bytes(4096), chance.randbytes(4096)]))
                with CanonicalStore(lost, IDENTITY, capacity=60 * FILE) as store:
                    outcomes = serve_all(store, range(50))
                    if sync != "none" and outcomes["damaged"]:
                        raise WrongBytesError(f"synced before rename, yet {outcomes}")
                    evicted_from = next(
                        (n for n, event in enumerate(files.log) if event[0] == "unlink"), at
                    )
                    if sync == "full" and at <= evicted_from:
                        promised = [n for n, after in reported.items() if after <= at]
                        found = store.lookup([key_of(n) for n in promised], "full")
                        if not found.all():
                            raise WrongBytesError("a chunk that was reported as durable is gone")
                    if serve_all(store, range(50))["damaged"]:
                        raise WrongBytesError("a damaged chunk was met twice")
                totals.update({f"{sync} {outcome}": n for outcome, n in outcomes.items()})
                totals["losses"] += 1
                shutil.rmtree(lost)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return totals


# ---- damaged files ----------------------------------------------------------------------------


def harmed(good: bytes, chance: random.Random) -> tuple[str, bytes]:
    """`good` with something wrong with it, and what."""
    kind = chance.choice(["bit", "bit", "bit", "byte", "cut", "zeros", "swap", "longer", "empty"])
    bad = bytearray(good)
    if kind == "bit":
        bit = chance.randrange(8 * len(bad))
        bad[bit // 8] ^= 1 << bit % 8
    elif kind == "byte":
        bad[chance.randrange(len(bad))] = chance.randrange(256)
    elif kind == "cut":
        del bad[chance.randrange(len(bad)) :]
    elif kind == "zeros":
        start = chance.randrange(len(bad) // 512) * 512
        bad[start : start + 512] = bytes(512)
    elif kind == "swap":
        one, two = (chance.randrange(len(bad) // 512) * 512 for _ in range(2))
        bad[one : one + 512], bad[two : two + 512] = bad[two : two + 512], bad[one : one + 512]
    elif kind == "longer":
        bad += chance.randbytes(chance.randrange(1, 9000))
    else:
        bad.clear()
    return kind, bytes(bad)


def damage(rounds: int, seed: int = 0) -> Counter[str]:
    """Harm a stored file in `rounds` random places: it is noticed, or makes no difference."""
    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    folder = tempfile.mkdtemp(prefix="vkvmap-damage-")
    key, row = key_of(1), aligned(FULL)
    right = content_of(key, FULL)
    try:
        with CanonicalStore(folder, IDENTITY, quarantine_files=2) as store:
            store.put([key], "full", [right]).wait(30)
            place = next(ls(folder)).path
            with open(place, "rb") as file:
                good = file.read()
            for _ in range(rounds):
                kind, bad = harmed(good, chance)
                with open(place, "wb") as file:
                    file.write(bad)
                job = store.get([key], "full", [row])
                job.wait(30)
                outcome = job.outcomes[0]
                if outcome == "hit":
                    if not np.array_equal(row, right):
                        raise WrongBytesError(f"{kind}: wrong bytes served")
                    same = bad[: 4096 + FULL] == good[: 4096 + FULL]
                    if not same:
                        raise WrongBytesError(f"{kind}: damage was not noticed")
                    outcome = "harmless"
                elif outcome != "damaged":
                    raise WrongBytesError(f"{kind}: {outcome} ({job.reasons})")
                totals[f"{kind} {outcome}"] += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return totals


# ---- many processes ---------------------------------------------------------------------------


def one_of_many(path: str, seed: int, seconds: float, report: int) -> None:
    """Store, load, look up and delete the same few keys as everybody else."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    contents = {number: content_of(key_of(number), FULL) for number in range(48)}
    with CanonicalStore(path, IDENTITY, capacity=30 * FILE, threads=2, sync="none") as store:
        while time.monotonic() < deadline:
            numbers = chance.sample(range(48), 6)
            keys = [key_of(number) for number in numbers]
            job = store.put(keys, "full", [contents[number] for number in numbers])
            counts.update(serve_all(store, range(numbers[0], min(48, numbers[0] + 4))))
            if not job.wait(60):
                raise WrongBytesError("a put did not finish within a minute")
            counts.update(job.outcomes)
            counts["lookups"] += int(store.lookup(keys, "full").sum())
            if chance.random() < 0.1:
                counts["deleted"] += store.delete(keys[:1], "full")
    if counts["damaged"] or counts["failed"]:
        raise WrongBytesError(f"{counts}")
    os.write(report, (repr(dict(counts)) + "\n").encode())


def crowd(seconds: float, processes: int = 8) -> Counter[str]:
    """Let processes store and load the same keys for a while."""
    folder = tempfile.mkdtemp(prefix="vkvmap-crowd-")
    receive, report = os.pipe()
    children, totals = [], Counter()
    try:
        for seed in range(processes):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    one_of_many(folder, seed, seconds, report)
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        deadline = time.monotonic() + seconds + 60
        codes = {}
        while len(codes) < processes and time.monotonic() < deadline:
            for pid in children:
                if pid not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        if len(codes) < processes:
            for pid in set(children) - set(codes):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise WrongBytesError("deadlock: processes did not end")
        if any(codes.values()):
            raise WrongBytesError(f"processes failed: {codes}")
        os.close(report)
        with os.fdopen(receive) as lines:
            for line in lines:
                totals.update(eval(line, {}, {}))
        found = fsck(folder)
        if not found.clean or found.orphans:
            raise WrongBytesError(f"{found}")
        if found.nbytes > 30 * FILE:
            raise WrongBytesError(f"{found.nbytes} bytes exceed the capacity")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["kill", "power", "damage", "crowd"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    if asked.kind == "crowd":
        totals = crowd(asked.seconds)
    else:
        does, rounds = {
            "kill": (kill, 500),
            "power": (power, 1500),
            "damage": (damage, 10_000),
        }[asked.kind]
        totals = does(asked.rounds or rounds, asked.seed)
    for what, count in sorted(totals.items()):
        print(f"{what:24} {count:>10,}")
    print(f"no wrong byte, no leak; {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
