"""The end of a command: a mistake is one line and an exit code, and output that nobody reads is no error."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from typing import Any

import click

from fedsim.errors import DiskError, FedsimError, Interrupted
from launch import terminal

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to standard output that is a file."""

_NO_FOLDER = "No usable temporary directory"
"""The words of tempfile.gettempdir; dill calls it while torch imports it."""


class Commands(click.Group):
    """Commands whose mistakes are one clear line and an exit code, never a traceback."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        # of its own, too: a command keeps the help option of the first context that asks for it
        cmd.context_settings.setdefault("help_option_names", ["-h", "--help"])
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> Any:
        code = 0
        terminal.open_standard_files()
        try:
            super().invoke(ctx)
        except FedsimError as e:
            code = _complain(e, str(e))
        except KeyboardInterrupt:
            code = _complain(Interrupted, "interrupted")
        except (BrokenPipeError, SystemExit) as e:  # rich makes a SystemExit of it
            if not isinstance(e, BrokenPipeError) and not isinstance(e.__context__, BrokenPipeError):
                raise
            # whoever read the output has enough of it
        except OSError as e:
            if e.filename is None and e.errno in _FULL:
                code = _complain(DiskError, f"the output cannot be written: {e.strerror}")
            elif e.filename is None and _NO_FOLDER in str(e.strerror):
                code = _complain(DiskError, f"cannot make a temporary file: {e.strerror}")
            else:
                raise
        lost = terminal.finish_output()
        if lost is not None and not code and not isinstance(lost, BrokenPipeError):
            code = _complain(DiskError, f"the output cannot be written: {lost.strerror}")
        if code:
            sys.exit(code)


def _complain(error: FedsimError | type[FedsimError], text: str) -> int:
    """Say what is wrong; returns the exit code."""
    with suppress(OSError):
        click.echo(f"fedsim: {text}", err=True)
    return error.exit_code
