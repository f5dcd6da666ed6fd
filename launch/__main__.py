"""python -m launch: the same as the fedsim command."""

import sys


def run() -> None:
    """Carry out the command line; Ctrl-C at any moment, also during the imports, is one line."""
    try:
        from launch.cli import main

        main()
    except KeyboardInterrupt:
        print("fedsim: interrupted", file=sys.stderr)
        sys.exit(130)


run()
