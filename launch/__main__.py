"""The fedsim command, also as python -m launch."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C, even during the imports, prints one line and no traceback."""
    try:
        from launch.cli import main

        main()
    except KeyboardInterrupt:
        print("fedsim: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
