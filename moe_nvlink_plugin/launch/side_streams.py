"""Streams for launches that run beside the caller's stream."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import MoeNvlinkError

logger = logging.getLogger(__name__)


class SideStream(NamedTuple):
    """The stream of one channel's launches beside the caller's stream, and its two events.

    Attributes:
        stream: its priority is the highest, so its CTAs find a place before those of a large
            kernel's next wave.
        begun: what the caller's stream has done before the launch.
        done: the launch.
    """

    stream: Any
    begun: Any
    done: Any

    @classmethod
    def create(cls, index: int) -> SideStream:
        """Create a channel's stream on a device, also while a thread captures a CUDA graph."""
        api = driver.api()
        with driver.on_device(index), driver.relaxed_capture():
            _least, greatest = driver.call("cuCtxGetStreamPriorityRange")
            flags = api.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = driver.call("cuStreamCreateWithPriority", flags, greatest)
            untimed = api.CUevent_flags.CU_EVENT_DISABLE_TIMING
            events = [driver.call("cuEventCreate", untimed) for _ in range(2)]
        return cls(stream, *events)

    @staticmethod
    def destroy(index: int, sides: dict[int, SideStream]) -> None:
        """Destroy streams and events; what still runs on the streams ends first."""
        if not sides:
            return
        try:
            with driver.on_device(index), driver.relaxed_capture():
                for side in sides.values():
                    driver.call("cuStreamDestroy", side.stream)
                    driver.call("cuEventDestroy", side.begun)
                    driver.call("cuEventDestroy", side.done)
        except MoeNvlinkError as error:  # a finalizer cannot raise
            logger.warning("moe_nvlink: streams of GPU %d stay: %s", index, error)
