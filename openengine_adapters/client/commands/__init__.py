"""The subcommands of `openengine`, a module each.

`add_arguments(parser)` adds a command's options; `run(args, terminal)` returns the coroutine that carries it
out and gives the exit code.
"""


class UsageError(Exception):
    """The command was not used as intended; nothing was sent to be computed."""
