"""The entry point of the `fedsim` command and of `python -m fedsim`.

It is here and not in launch, so that `import fedsim` comes first: if another file hides the package launch,
the error names that file (fedsim.hidden_packages).
"""

from importlib import import_module


def run() -> None:
    """Run the command line."""
    import_module("launch.__main__").run()


if __name__ == "__main__":
    run()
