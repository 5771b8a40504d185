"""Engines and servers of vLLM's tests take their models from VLLM_MODEL_REDIRECT_PATH at once.

vLLM follows its redirects only in `ModelConfig`. Before it gets there, `EngineArgs` has asked the
hub for the name as it stands: for the model's folder when offline, else for its config, to see
whether it is a speculator's. Here the name becomes the folder where it enters, and stays the name
under which the model is served.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def pytest_collection_finish() -> None:
    """Patches vLLM and its tests' helpers, which are imported by now if any test needs them."""
    from vllm.engine.arg_utils import EngineArgs

    _redirect_engines(EngineArgs)
    helpers = sys.modules.get("tests.utils")
    if helpers is not None:
        _redirect_servers(helpers.RemoteVLLMServer)


def _redirect_engines(engine_args: Any) -> None:
    original = engine_args.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        folder = _folder(self.model)
        if folder != self.model:
            self.served_model_name = self.served_model_name or self.model
            self.model = folder
        self.tokenizer = _folder(self.tokenizer)
        draft = self.speculative_config
        if isinstance(draft, dict) and "model" in draft:
            self.speculative_config = {**draft, "model": _folder(draft["model"])}
        original(self)

    engine_args.__post_init__ = post_init


def _redirect_servers(server: Any) -> None:
    original = server.__init__

    @functools.wraps(original)
    def init(self: Any, model: str, flags: list[str], **options: Any) -> None:
        folder = _folder(model)
        if folder != model and "--served-model-name" not in flags:
            # The list itself: tests look into it for what their server was told.
            flags += ["--served-model-name", model]
        original(self, folder, flags, **options)

    server.__init__ = init


def _folder(name: Any) -> Any:
    from vllm.transformers_utils.utils import maybe_model_redirect

    return maybe_model_redirect(name) if isinstance(name, str) else name
