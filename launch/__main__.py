"""The entry point of the `fedsim` command and of `python -m launch`."""

import sys


def run() -> None:
    """Run the command line. Ctrl-C prints one line without a traceback, even during the imports."""
    try:
        from launch.cli import main

        main()
    except KeyboardInterrupt:
        print("fedsim: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
