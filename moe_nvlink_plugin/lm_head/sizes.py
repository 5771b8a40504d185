"""The regions of a shared LM head in symmetric memory."""

from __future__ import annotations

from moe_nvlink_plugin.memory.layout import REGION_ALIGNMENT, WorkspaceLayout

from .config import HeadConfig
from .shapes import MOST_HEAD_SPLITS


def head_layout(config: HeadConfig, alignment: int = REGION_ALIGNMENT) -> WorkspaceLayout:
    """Make the layout of one shared LM head. Nothing joins its workspace later.

    Args:
        config: the group's configuration.
        alignment: bytes to which the transport aligns places.

    Raises:
        ConfigError: there are more bytes than a window holds.
    """
    slots = config.tp_size * config.max_rows_per_rank
    sizes = {
        "head_rows": slots * config.hidden_size * config.dtype.itemsize,  # slice s: by rank s
        "head_pairs": slots * MOST_HEAD_SPLITS * 8,  # slice s: by rank s, of this rank's rows
    }
    if config.full_logits:
        sizes["head_logits"] = slots * config.shard_size * config.dtype.itemsize  # by this rank
    return WorkspaceLayout.of(config.tp_size, 1, sizes, alignment, room=1)
