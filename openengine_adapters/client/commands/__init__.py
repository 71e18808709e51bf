"""The subcommands of `openengine`, a module each.

`add_arguments(parser)` adds a command's options; `run(args, terminal)` returns the coroutine that carries it
out and gives the exit code.
"""
