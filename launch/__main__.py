"""The command line as a program: `python -m launch`, and, through fedsim.__main__, `fedsim`."""

import sys


def run() -> None:
    """Run the command line. Ctrl-C prints one line without a traceback, even during the imports.
    The same holds for a file that hides one of fedsim's packages (fedsim.hidden_packages)."""
    try:
        from launch.cli import main

        main()
    except KeyboardInterrupt:
        print("fedsim: interrupted", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"fedsim: {error}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    run()
