"""The border to the native module: its refusals as errors of the package, streams as numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from vkvmap.errors import PlanError, TransferError, VkvmapError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def translated(error: ValueError | RuntimeError, before: str = "", after: str = "") -> VkvmapError:
    """The package's error for what the native module raised: PlanError or TransferError.

    `before` and `after` are put around its words.
    """
    kind = PlanError if isinstance(error, ValueError) else TransferError
    return kind(f"{before}{error}{after}")


def translating(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """`call`, whose native refusals are errors of the package."""

    @wraps(call)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except VkvmapError:
            raise
        except (ValueError, RuntimeError) as error:
            raise translated(error) from None

    return wrapped


def stream_handle(stream: Any) -> int:
    """The number of a stream that is given as such, by an object with ``cuda_stream``, or as None.

    Raises PlanError for anything else.
    """
    if stream is None:
        return 0
    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise PlanError(
            f"stream {stream!r:.60} is no CUDA stream; pass a stream with cuda_stream, its handle "
            "as a number, or None for the default one"
        )
    return handle
