"""One file per command. Each has `add_parser(subparsers)` and `run(args) -> exit code`; heavy imports happen inside `run`."""
