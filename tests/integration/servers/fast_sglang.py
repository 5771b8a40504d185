"""SGLang's servers, forked from one process that has imported everything, as `fast_server` does it.

.venv-sglang/bin/python tests/integration/servers/fast_sglang.py <number of a socket>
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    # As a script, it has its own folder on the path.
    sys.path[0] = str(Path(__file__).parents[3])

PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
    "torch.distributed._functional_collectives",
)


def preload() -> None:
    """Imports what servers need; nothing that a plugin could still want to change is decided."""
    for name in PRELOADED:
        importlib.import_module(name)
    from sglang.srt import plugins

    assert not plugins._plugins_loaded
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.sglang import interpreted

        interpreted.install_in_servers()


if __name__ == "__main__":
    from tests.integration.servers import fast_server

    with fast_server.kept_from_collection():
        preload()
    fast_server.serve(socket.socket(fileno=int(sys.argv[1])))
