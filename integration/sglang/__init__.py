"""SGLang's adapter: one entry point. The import of this module does nothing.

``register`` (group ``sglang.srt.plugins``) runs in every process of SGLang. It registers what
makes ``--moe-a2a-backend moe_nvlink`` known and checked, and a hook that waits for arguments which
name it.

Where things are (``plugin`` imports all of it; the rest does not import ``plugin``):

* ``backend`` and ``choices`` say what the arguments ask of us, ``budget`` how many tokens a round
  may carry, ``worker`` holds what a process has of ours, ``effect`` says whether every hook took
  effect. ``compat`` knows every name of SGLang that we touch.
* ``moe``: the dispatchers, in the place of SGLang's.
* ``plugin``: the way of the flag. ``hooks`` (what is registered, and when) -> ``flag`` (command
  line), ``resolution`` (arguments) -> ``validation`` (refusals).

Without the flag only ``backend``, ``effect`` and ``plugin`` are ever loaded, and no module of
SGLang's layers. All of it stands on ``integration.common``, which knows no framework.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register our hooks with SGLang. Local.

    SGLang logs an exception with its traceback and goes on without the plugin. This function also
    keeps the reason for `effect.assert_hooks`.
    """
    from . import effect

    effect.forget()
    try:
        from .plugin import hooks

        hooks.register()
    except Exception as error:
        effect.note_failure("the plugin was not registered", error)
        raise
