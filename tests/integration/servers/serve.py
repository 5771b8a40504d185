"""`vllm serve`, whose options for several API servers and nodes the old module of servers ignores.

vLLM's own command ends at once with its CPU build: it asks for the version of a distribution of
another name, and it loads a library for CPUs with AVX-512.

    python tests/integration/servers/serve.py serve --model ...
"""

from __future__ import annotations

from typing import Any


def main() -> None:
    """Parses and starts as vLLM's command does."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _env_setup()()
    parser = FlexibleArgumentParser()
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args()
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def _env_setup() -> Any:
    """What vLLM's command calls first; 0.33 has moved it."""
    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    return cli_env_setup


if __name__ == "__main__":
    main()
