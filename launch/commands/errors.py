"""Error handling of commands: an error prints one line and sets an exit code; a closed output is no error.

The errors of click have the same form as all others, and they name an option as the user typed it.
"""

from __future__ import annotations

import errno
import math
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from fedsim.errors import DiskError, FedsimError, Interrupted, TaskError, UsageError, nearest, unknown
from fedsim.experiment import is_utf8
from fedsim.removed import removed
from launch import terminal
from launch.inherited import check_working_folder, children_kept

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of failed writes to standard output that is redirected to a file."""

_NO_FOLDER = "No usable temporary directory"
"""Part of the error message of tempfile.gettempdir, which dill calls when torch imports dill."""
_NO_MEMORY = ("failed to map segment", "annot allocate memory")
"""Parts of the dynamic loader's messages for a library, such as torch's, that does not fit into memory."""


class Command(click.Command):
    """A command that refuses repeated options and numbers that are not finite."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; refuse a repeated option and a number that is not finite."""
        if not ctx.resilient_parsing:
            ctx.meta[_TYPED] = tuple(args)
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for parameter, times in Counter(order).items():
                if not isinstance(parameter, click.Option) or parameter.multiple:
                    continue
                if times > 1 and not (parameter.is_flag or parameter.count):
                    raise click.UsageError(f"{_typed(parameter, ctx)} is given twice; give it once", ctx)
        result = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name or "")
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise click.UsageError(f"{_typed(parameter, ctx)} {number}: must be a finite number", ctx)
        return result


class LazyCommands(Mapping[str, click.Command]):
    """Commands by name, each imported when it is first asked for.

    Source: lazily loading subcommands, https://click.palletsprojects.com/en/stable/complex/
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        """Set the module of each command, in which the function has the command's name."""
        self._modules = modules

    def __getitem__(self, name: str) -> click.Command:
        module = import_module(self._modules[name])
        command: click.Command = getattr(module, f"{name}_" if name == "list" else name)
        # each command needs this, too: it caches the help option of the first context that asks for one
        command.context_settings.setdefault("help_option_names", ["-h", "--help"])
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class Commands(click.Group):
    """Commands whose errors are one line and an exit code instead of a traceback.

    The error for an unknown command suggests the nearest name.
    """

    def __init__(
        self, modules: Mapping[str, str], groups: Mapping[str, Mapping[str, str]], **options: Any
    ) -> None:
        """Set the commands by section of --help, with their descriptions, so that --help imports no command.
        `modules` has the modules of launch.commands that are not called like their command."""
        super().__init__(**options)
        verbs = [verb for group in groups.values() for verb in group]
        self.commands = LazyCommands(  # type: ignore[assignment]
            {verb: f"launch.commands.{modules.get(verb, verb)}" for verb in verbs}
        )
        self._groups = groups

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names."""
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            if args[0].startswith("-"):
                raise click.NoSuchOption(args[0], ctx=ctx)
            path = _path(ctx)
            if gone := removed("command", args[0]):
                raise UsageError(f"fedsim {gone}")
            raise unknown(f"command of {path}:", args[0], self.commands, command=f"{path} --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands and their descriptions, by section."""
        for title, verbs in self._groups.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()), col_max=10)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments before the command; --help and --version exit here."""
        terminal.open_standard_files()
        try:
            for word in args:
                if not is_utf8(word):
                    raise click.UsageError(f"{word!a} is not UTF-8; rename the file or folder")
            return super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as e:
            raise click.exceptions.Exit(_complain(UsageError, _worded(e))) from None
        except click.exceptions.Exit:
            terminal.finish_output()
            raise
        except BrokenPipeError:
            terminal.finish_output()
            raise click.exceptions.Exit(0) from None

    def invoke(self, ctx: click.Context) -> Any:
        code = 0
        try:
            check_working_folder()
            with children_kept():
                super().invoke(ctx)
        except FedsimError as e:
            code = _complain(e, str(e))
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as e:
            code = _complain(UsageError, _worded(e))
        except KeyboardInterrupt:
            code = _complain(Interrupted, "interrupted")
        except (BrokenPipeError, SystemExit) as e:  # rich turns a broken pipe into SystemExit
            if not isinstance(e, BrokenPipeError) and not isinstance(e.__context__, BrokenPipeError):
                raise
            # the reader has closed the pipe
        except (ImportError, MemoryError) as e:
            if isinstance(e, ImportError) and not any(words in str(e) for words in _NO_MEMORY):
                raise
            code = _complain(TaskError, _out_of_memory(e))
        except OSError as e:
            if e.filename is None and e.errno in _FULL:
                code = _complain(DiskError, f"the output cannot be written: {e.strerror}")
            elif e.filename is None and _NO_FOLDER in str(e.strerror):
                code = _complain(DiskError, f"cannot make a temporary file: {e.strerror}")
            elif e.errno == errno.ENAMETOOLONG:
                code = _complain(UsageError, f"{e.filename}: {e.strerror}")
            else:
                raise
        lost = terminal.finish_output()
        if lost is not None and not code and not isinstance(lost, BrokenPipeError):
            code = _complain(DiskError, f"the output cannot be written: {lost.strerror}")
        if code:
            sys.exit(code)


def _out_of_memory(e: ImportError | MemoryError) -> str:
    """Return an error message with advice for a library or an array that does not fit into memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = f"this shell allows {soft / 1e9:.1f} GB of addresses (ulimit -v); torch needs 4 GB and more"
    what = " ".join(str(e).split()) or "an array was too large"
    return f"out of memory: {what}: {limit if soft != resource.RLIM_INFINITY else 'run it with more memory'}"


def _complain(error: FedsimError | type[FedsimError], text: str) -> int:
    """Print the error and return its exit code."""
    with suppress(OSError):
        terminal.say(f"fedsim: {text}", err=True)
    return error.exit_code


# ---- click's own errors

_TYPED = "fedsim.typed"
"""Key of a command's arguments, as typed, in click's metadata."""


def _worded(e: click.UsageError) -> str:
    """Return the error message for one of click's errors."""
    if isinstance(e, click.NoSuchOption):
        return _no_such_option(e)
    if isinstance(e, click.MissingParameter) and e.param is not None:
        return f"{_typed(e.param, e.ctx)} is missing: {_usage(e.ctx)}"
    if isinstance(e, click.BadParameter) and e.param is not None:
        return _bad_value(e, e.param)
    if isinstance(e, click.BadOptionUsage):
        missing = "requires an argument" in e.message
        return f"{e.option_name}: {'its value is missing' if missing else 'it takes no value'}"
    text = " ".join(e.format_message().split()).rstrip(".")
    if text.startswith("Got unexpected extra argument"):
        return f"unexpected {text.partition('extra ')[2]}: {_usage(e.ctx)}"
    return text


def _no_such_option(e: click.NoSuchOption) -> str:
    if gone := removed("option", e.option_name):
        return gone
    parameters = e.ctx.command.get_params(e.ctx) if e.ctx else []
    options = {name for p in parameters if isinstance(p, click.Option) for name in p.opts}
    meant = nearest(e.option_name, {name for name in options if name.startswith("--")})
    hint = f"; did you mean {meant!r}?" if meant else ""
    if e.option_name == "--workers" and "--jobs" in options:
        hint = "; --jobs N is how many runs are computed side by side, each without workers"
    show = "--help-all" if "--help-all" in options else "--help"
    return f"{e.option_name} is no option of {_path(e.ctx)}{hint} (all: {_path(e.ctx)} {show})"


def _bad_value(e: click.BadParameter, parameter: click.Parameter) -> str:
    """Return the error message for a wrong value, such as --rounds 'x': must be a whole number."""
    name, kind = _typed(parameter, e.ctx), parameter.type
    value, known, _ = e.message.partition(" is not ")
    expected = _expected(kind)
    if not known or not expected:
        return f"{name}: {' '.join(e.message.split()).rstrip('.')}"
    typed = value.strip("'")
    if gone := removed("option", f"{name} {typed}"):
        return gone
    meant = nearest(typed, kind.choices) if isinstance(kind, click.Choice) else None
    return f"{name} {value}: must be {expected}" + (f"; did you mean {meant!r}?" if meant else "")


def _expected(kind: Any) -> str:
    """Describe the values of a type; '' for an unknown type."""
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    if isinstance(kind, click.types.IntParamType):
        words = "a whole number"
    elif isinstance(kind, click.types.FloatParamType):
        words = "a number"
    else:
        return ""
    if isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
        words += f" {'above' if kind.min_open else 'of at least'} {kind.min:g}"
        words += f" and at most {kind.max:g}" if kind.max is not None else ""
    return words


def _typed(parameter: click.Parameter, ctx: click.Context | None) -> str:
    """Return an option as it was typed, such as --worker for --seat, or an argument's name in the help."""
    if not isinstance(parameter, click.Option):
        return str(parameter.metavar or parameter.name).upper().strip("[].")
    words: Sequence[str] = ctx.meta.get(_TYPED, ()) if ctx else ()
    supplied = [name for name in parameter.opts if any(w == name or w.startswith(f"{name}=") for w in words)]
    return supplied[0] if supplied else max(parameter.opts, key=len)


def _path(ctx: click.Context | None) -> str:
    names: list[str] = []
    while ctx is not None and ctx.parent is not None:
        names.insert(0, str(ctx.info_name))
        ctx = ctx.parent
    return " ".join(["fedsim", *names])


def _usage(ctx: click.Context | None) -> str:
    """Return the usage line, such as fedsim resume [OPTIONS] RUN, with the required options."""
    pieces = ctx.command.collect_usage_pieces(ctx) if ctx else []
    parameters = ctx.command.get_params(ctx) if ctx else []
    needed = [p for p in parameters if isinstance(p, click.Option) and p.required]
    options = [f"{p.opts[0]} {p.make_metavar(ctx)}" for p in needed] if ctx else []
    return " ".join([_path(ctx), *options, *pieces])
