"""The GPU movers' own sources, compiled for the CPU: bytes, order, failures, registration, graphs.

The runtime is the stand-in in tests/cuda_cpu, which runs stream work late and in a seeded order.
The scenarios and their oracle are in C++ beside it; each is run plain for many seeds, and under
AddressSanitizer and UndefinedBehaviorSanitizer for fewer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_stand_in import scenarios
from tests.cuda_toolchain import Workshop, run

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory)


def play(program: Path, scenario: str, first: int, count: int) -> None:
    # Fibers leave their stacks behind: that is the stand-in's, not a leak of what is tested.
    env = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    run(program, scenario, str(first), str(count), env=env, timeout=300)


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_every_byte_is_moved_and_no_other(first: int, workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "moves", first, 100)


def test_offsets_beyond_32_bits_are_right_on_either_side(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "wide", 0, 1)


def test_transfers_wait_for_what_the_callers_stream_has_pending(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "order", 0, 150)


def test_without_its_wait_a_transfer_would_go_wrong(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "order-without-waits", 0, 20)


def test_ids_of_pending_transfers_are_not_overwritten(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "ring", 0, 15)


def test_jobs_of_the_engine_that_meet_run_in_the_order_of_submission(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "engine", 0, 60)


def test_a_failing_runtime_call_is_told_and_leaves_nothing_behind(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "failures", 0, 6)


def test_registration_is_whole_rows_and_all_or_nothing(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "registration", 0, 10)


def test_graphs_replay_with_other_ids_and_captures_are_not_spoiled(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "graphs", 0, 30)


def test_each_device_is_used_under_its_own_guard(workshop: Workshop) -> None:
    play(scenarios("plain", workshop), "devices", 0, 10)


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        ("moves", 12),
        ("order", 8),
        ("ring", 1),
        ("engine", 4),
        ("failures", 1),
        ("registration", 3),
        ("graphs", 5),
    ],
)
def test_the_sanitizers_find_nothing(scenario: str, count: int, workshop: Workshop) -> None:
    play(scenarios("sanitized", workshop), scenario, 1000, count)
