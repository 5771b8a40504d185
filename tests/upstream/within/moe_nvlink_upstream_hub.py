"""What vLLM's tests download besides the models they serve, from local stand-ins.

* `HfApi.snapshot_download` of a model that VLLM_MODEL_REDIRECT_PATH knows gives its stand-in:
  offline, engine arguments ask for one before they look at that variable.
* `ImageAsset` finds pictures of noise under the names below.

Everything else goes to the hub's library, which is offline here. Imports nothing of our package,
as runs without our plugin load it too.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

#: vLLM's names of pictures, and width and height.
PICTURES = {"cherry_blossom": (320, 240), "stop_sign": (320, 240)}


def install() -> None:
    """Puts all of it in place, for this process and its forks. Local, for good."""
    folder = Path(tempfile.mkdtemp(prefix="assets-"))  # the runner removes its TMPDIR
    os.environ["VLLM_ASSETS_CACHE"] = str(folder)
    _write_pictures(folder / "vllm_public_assets")
    serve_snapshots()


def _write_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for name, size in PICTURES.items():
        Image.effect_noise(size, 64).convert("RGB").save(folder / f"{name}.jpg")


def serve_snapshots() -> None:
    """Stand-ins for snapshots of the models that have one. Local, for good."""
    from huggingface_hub import HfApi

    original: Any = HfApi.snapshot_download

    @functools.wraps(original)
    def snapshot_download(self: Any, repo_id: str, *args: Any, **kwargs: Any) -> str:
        from vllm.transformers_utils.utils import maybe_model_redirect

        stand_in: str = maybe_model_redirect(repo_id)
        if stand_in == repo_id and kwargs.get("ignore_patterns") == "*":
            return repo_id  # engine arguments, which keep the name when online
        if stand_in == repo_id:
            return str(original(self, repo_id, *args, **kwargs))
        return stand_in

    HfApi.snapshot_download = snapshot_download  # type: ignore[assignment,method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any test module is imported: some ask for a picture there."""
    install()
