"""The command that `fedsim relay` starts, and the loop that relays until the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedsim.errors import UsageError
from launch.processes.fork_server import die_with_parent
from workers.transport.eventfd import Wakeup
from workers.transport.relay import Relay

VARIABLE = "FEDSIM_RELAY"
"""The environment variable in which the command gets the relay's address."""
GRACE = 5.0
"""Seconds that open connections have to end by themselves after the command has ended."""
STOP_DEADLINE = 10.0
"""Seconds that the command has to end after a signal was forwarded to it."""
TERM_DEADLINE = 5.0
"""Seconds that the command's process group has to end after SIGTERM before it is killed."""
LONGEST = 1 << 16
"""The longest line of output in bytes; a longer line is searched in parts."""
TURN = 0.1
PIECE = 1 << 16
"""The capacity of a pipe in bytes."""


@dataclass(frozen=True)
class Outcome:
    """The end of a relay. `code` is the command's exit code, 128 plus the number of a signal that killed it,
    or None without a command. `interrupted` is True if SIGINT, SIGTERM or SIGHUP ended the relay."""

    code: int | None
    interrupted: bool


class _Output:
    """A pipe from the command, whose content is passed on to a descriptor of this process."""

    def __init__(self, source: int, sink: int, line: Callable[[str], None]) -> None:
        self.source, self._sink, self._line, self._partial = source, sink, line, b""
        os.set_blocking(source, False)

    def read(self) -> bool:
        """Pass on at most PIECE bytes, to let connections have their turn. Return False at the pipe's end."""
        try:
            text = os.read(self.source, PIECE)
        except BlockingIOError:
            return True
        self._pass_on(text)
        *lines, rest = (self._partial + text).split(b"\n")
        if not text or len(rest) > LONGEST:
            lines, rest = [*lines, rest], b""
        self._partial = rest
        for line in lines:
            self._line(line.decode(errors="replace"))
        return bool(text)

    def _pass_on(self, text: bytes) -> None:
        with suppress(OSError):  # the reader has closed the sink
            while text:
                text = text[os.write(self._sink, text) :]


class _Command:
    """A started command: its process group, and its output if lines are searched."""

    def __init__(
        self, words: Sequence[str], relay: Relay, line: Callable[[str], None] | None, json: bool
    ) -> None:
        self._relay = relay
        stdout = 2 if json else 1
        pipe = None if line is None else subprocess.PIPE
        flushed = {} if line is None else {"PYTHONUNBUFFERED": "1"}
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout if pipe is None else pipe,
                stderr=pipe,
                env={**flushed, **os.environ, VARIABLE: relay.near_address},
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()),  # safe with one thread
            )
        except OSError as e:
            raise UsageError(f"cannot start {words[0]}: {e.strerror}") from None
        self._end = os.pidfd_open(self.process.pid)
        relay.watch(self._end, lambda: relay.ignore(self._end))
        self._outputs: list[_Output] = []
        if line is not None:
            for file, sink in ((self.process.stdout, stdout), (self.process.stderr, 2)):
                assert file is not None
                self._follow(_Output(file.fileno(), sink, line))

    def _follow(self, output: _Output) -> None:
        def ready() -> None:
            if not output.read():
                self._relay.ignore(output.source)
                self._outputs.remove(output)

        self._outputs.append(output)
        self._relay.watch(output.source, ready)

    @property
    def ended(self) -> bool:
        """True if the first process has ended. It is not reaped, which would free the group's number."""
        return os.waitid(os.P_PIDFD, self._end, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def gone(self) -> bool:
        """True if no process of the command's group is alive."""
        return not any(
            group == self.process.pid and state not in ("Z", "X") for state, group in _states_and_groups()
        )

    @property
    def quiet(self) -> bool:
        """True if no process has the command's output open any more."""
        return not self._outputs

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the command's group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> int:
        """Kill the remaining processes of the group, and stop watching; return the exit code."""
        self.signal(signal.SIGKILL)
        for output in list(self._outputs):
            self._relay.ignore(output.source)
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        self._relay.ignore(self._end)
        os.close(self._end)
        code = self.process.wait(STOP_DEADLINE)
        return code if code >= 0 else 128 - code


class _Signals:
    """The handler of SIGINT, SIGTERM and SIGHUP while the relay runs.

    The loop forwards the first signal to the command. The second signal kills the command, and the relay ends
    as after the first. The third signal ends this process at once.
    """

    def __init__(self, wakeup: Wakeup) -> None:
        self.numbers: list[int] = []
        """The signals received so far."""
        self.command: _Command | None = None
        self._wakeup = wakeup

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handler in a block. An ignored SIGHUP (nohup) stays ignored."""
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handled.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)

    @property
    def killed(self) -> bool:
        return len(self.numbers) > 1

    def _handle(self, number: int, frame: object) -> None:
        self.numbers.append(number)
        self._wakeup.set()
        if self.killed and self.command is not None:
            self.command.signal(signal.SIGKILL)
        if len(self.numbers) > 2:
            os._exit(130)


def run_relay(
    relay: Relay, words: Sequence[str], line: Callable[[str], None] | None = None, json: bool = False
) -> Outcome:
    """Relay until a command ends, or until SIGINT, SIGTERM or SIGHUP; then close the relay.

    The command's process group gets the same signal. Processes of the group that still run GRACE seconds
    after the command's end get SIGTERM, then SIGKILL.

    Args:
        relay: The relay, which already listens.
        words: The command and its arguments; empty for no command.
        line: A function called with every output line, without its end; with None, no output is read.
        json: True if the command's standard output is to go to standard error.

    Raises:
        UsageError: if the command cannot be started.
    """
    wakeup = Wakeup()
    signals = _Signals(wakeup)
    command: _Command | None = None
    code = None
    try:
        with signals.handled():
            relay.watch(wakeup.fd, wakeup.clear)
            if words:
                command = signals.command = _Command(words, relay, line, json)
            while not signals.numbers and not (command is not None and command.ended):
                relay.turn(TURN)
            if command is not None:
                _end(relay, command, signals)
    finally:
        if command is not None:
            code = command.close()
        relay.ignore(wakeup.fd)
        relay.close()
        wakeup.close()
    return Outcome(code, bool(signals.numbers))


def _end(relay: Relay, command: _Command, signals: _Signals) -> None:
    """End the command if a signal was received; then end the remaining processes of its group."""
    if signals.numbers:
        command.signal(signals.numbers[0])
        _turn_until(relay, STOP_DEADLINE, lambda: command.ended or signals.killed)
    relay.stop_listening()
    count = len(signals.numbers)
    if command.ended:
        _turn_until(relay, GRACE, lambda: (not relay.busy and command.quiet) or len(signals.numbers) > count)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not command.gone:
            command.signal(number)
            _turn_until(relay, TERM_DEADLINE, lambda: command.gone or signals.killed)


def _states_and_groups() -> Iterator[tuple[str, int]]:
    """Yield the state and the process group of every process of this machine."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            state, _, group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
            yield state, int(group)


def _turn_until(relay: Relay, seconds: float, done: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not done() and (left := until - time.monotonic()) > 0:
        relay.turn(min(TURN, left))
