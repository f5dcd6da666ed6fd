"""The experiment: the part of the configuration that may change the bits of the results.

It is resolved once, with the precedence command line > file > defaults, and recorded in manifest.json under
`experiment`. The launcher's `execution` has the other settings (workers, transport, cores, output). Every
field has a description, from which its command-line option is generated.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fedsim import user_files
from fedsim.errors import DataError, UsageError, unknown
from fedsim.removed import removed

T = TypeVar("T")

UNSET = -1
"""The value that stands for the algorithm's default of a number."""


def option(
    description: str,
    metavar: str = "",
    where: str = "",
    *,
    default: str | None = None,
    name: str | None = None,
    **limits: Any,
) -> Meta:
    """Describe a field and its command-line option.

    metavar: the name of the value in the help. where: the option's section in `launch --help-all` (a key of
    launch.configuration.options.SECTIONS), then the other help texts that show it: "usual" for `fedsim launch
    --help`, "plan" if bytes depend on the option, "resume" if it may change. default: the default that the
    help shows, if it differs from the field's. name: the option's name, if it differs from the field's name
    with dashes; "" for a field without an option. limits: ge, gt, le or lt of msgspec.Meta.
    """
    section, *shown = where.split() or [""]
    extra = {"metavar": metavar, "default": default, "name": name}
    return Meta(description=description, extra={**extra, "section": section, "shown": shown}, **limits)


@dataclass(frozen=True)
class Experiment:
    """All settings on which the bits of a run depend, apart from the versions of libraries.

    An empty `model` and -1 for `rounds` or `eval_samples` mean the algorithm's default; an empty `inputs`
    means the data set's default. When a run is resumed, `rounds` may grow and `until` may change.

    Examples:
        >>> import fedsim
        >>> experiment = fedsim.Experiment(algo="fedlap", clients=100, participation="0.3")
        >>> experiment.dataset, experiment.seed
        ('digits', 0)
        >>> fedsim.plan(experiment, rounds=5)["rounds"]
        5
    """

    algo: Annotated[str, option("Algorithm, or path/to/file.py:CLASS.", "NAME", "algorithm usual plan")] = (
        "fedlap_cov"
    )
    dataset: Annotated[
        str,
        option(
            "Data set (fedsim list datasets), FILE.csv,label=COLUMN, or path/to/file.py:NAME.",
            "NAME",
            "data usual plan",
        ),
    ] = "digits"
    fraction: Annotated[float, option("Share of the training data in use.", "F", "data plan", gt=0, le=1)] = (
        1.0
    )
    inputs: Annotated[
        Literal["", "raw", "scaled"],
        option("Features as stored, or scaled.", "", "data", default="per data set"),
    ] = ""
    partition: Annotated[
        str,
        option("Split over clients (fedsim list partitions); +least:N behind it.", "SPEC", "data plan"),
    ] = "two_dirichlet"
    model: Annotated[
        str,
        option(
            "Model (fedsim list models), or path/to/file.py:NAME.",
            "NAME",
            "data usual plan",
            default="the algorithm's default",
        ),
    ] = ""
    train: Annotated[
        str,
        option(
            "Train only these parameters: head.*,*.bias (fedsim describe --model).",
            "PATTERNS",
            "data plan",
            default="all",
        ),
    ] = ""
    freeze: Annotated[
        str, option("Do not train these; they never cross the wire.", "PATTERNS", "data plan", default="none")
    ] = ""
    statistics: Annotated[
        Literal["", "frozen", "local", "average"],
        option(
            "Running statistics of batch normalisation: as at the start, each client's own, or averaged.",
            "",
            "data plan",
            default="refused",
        ),
    ] = ""
    """frozen: layers use the initial statistics. local: every client keeps its own statistics. average:
    messages carry statistics in both directions, and the server averages those of uploads weighted by N_k."""
    clients: Annotated[
        int, option("Clients, whatever the number of workers.", "N", "data usual plan", ge=1)
    ] = 10
    rounds: Annotated[
        int, option("Rounds.", "R", "algorithm usual plan resume", default="20; bcm 1", ge=UNSET)
    ] = UNSET
    until: Annotated[
        float,
        option(
            "End with the first evaluated round of this test accuracy: 0.78, 78%.",
            "ACCURACY",
            "evaluation usual plan resume",
            default="none",
            ge=0,
            le=1,
        ),
    ] = 0.0
    """The target accuracy; 0: there is none, and all rounds are computed."""
    participation: Annotated[
        str,
        option(
            "Who takes part: full, a share (0.3), a count (3), or a schedule (fedsim list schedules), with "
            "+gone:P, +lost:P, +event:RULE, +quiet:RULE.",
            "SCHEDULE",
            "schedule usual plan",
        ),
    ] = "full"
    seed: Annotated[int, option("Seed of all random streams.", "S", "data usual plan")] = 0
    eval_every: Annotated[int, option("Evaluate every N rounds.", "N", "evaluation", ge=1)] = 1
    eval_samples: Annotated[
        int,
        option(
            "Posterior samples averaged beside the mean, 0: none.",
            "N",
            "evaluation",
            default="per algorithm",
            ge=UNSET,
        ),
    ] = UNSET
    threads: Annotated[int, option("Threads per task; may change bits.", "T", "algorithm", ge=1, le=1024)] = 1
    numerics: Annotated[
        Literal["native", "portable", "tf32"],
        option(
            "portable: the same bits on x86 of all makes, more slowly; tf32: TensorFloat-32 of a GPU.",
            "",
            "algorithm",
        ),
    ] = "native"
    device: Annotated[
        Literal["cpu", "cuda"], option("What tasks compute on; follows from --devices.", name="")
    ] = "cpu"
    hyperparameters: Annotated[
        Mapping[str, Any],
        option(
            "A hyperparameter (fedsim describe ALGO); repeatable.",
            "KEY=VALUE",
            "algorithm usual plan",
            default="",
            name="--set",
        ),
    ] = field(default_factory=dict)
    """The hyperparameters that differ from the algorithm's defaults, by dotted name (local.lr)."""
    codecs: Annotated[
        Mapping[str, str],
        option(
            "Encoding of a message field; up.FIELD or down.FIELD for one direction; repeatable.",
            "FIELD=CODEC",
            "wire usual plan",
            default="",
            name="--codec",
        ),
    ] = field(default_factory=dict)
    compress: Annotated[
        Literal["none", "lossless", "few-bits", "fewest-bits"],
        option(
            "Codecs by a word (fedsim list compress).",
            "WORD",
            "wire usual plan",
        ),
    ] = "none"
    """The word is expanded to `codecs` when the problem is built; the manifest has the codecs and `none`."""
    error_feedback: Annotated[
        bool, option("Add to an upload what a lossy codec took from the client's last one.", "", "wire")
    ] = False
    evaluate_on: Annotated[
        str,
        option(
            "test, or held out: unused:N training rows, or fold:I/N of the clients' rows.",
            "ROWS",
            "evaluation",
        ),
    ] = "test"
    link: Annotated[
        str,
        option(
            "Virtual clock: up=10mbit,down=50mbit,rtt=40ms, or FILE.csv per client.",
            "L",
            "schedule",
            default="",
        ),
    ] = ""
    compute: Annotated[
        str, option("Virtual clock: time per example, 5ms or 5ms,noise=0.3.", "T", "schedule", default="")
    ] = ""
    deadline: Annotated[
        str, option("Virtual clock: later uploads are paid for, not folded.", "T", "schedule", default="")
    ] = ""
    asynchronous: Annotated[
        str,
        option(
            "Fold as soon as B uploads are there by the virtual clock: fedbuff:B, fedbuff:B+damp:0.5.",
            "RULE",
            "schedule",
            default="none",
            name="--async",
        ),
    ] = ""
    tree: Annotated[
        str,
        option(
            "Edge servers between clients and server: 4x25 (four of 25 clients each), or FILE.toml.",
            "TREE",
            "schedule plan",
            default="none",
        ),
    ] = ""
    bad_uploads: Annotated[
        Literal["stop", "skip", "retry"],
        option("An upload with NaN, Inf, a precision that is not positive or too large a norm.", "", "wire"),
    ] = "stop"
    """`stop` ends the run, `skip` treats the upload as lost, `retry` computes it once more and then stops."""
    max_norm: Annotated[float, option("Largest norm of an upload's tensor, 0: any.", "X", "wire", ge=0)] = 0.0
    """By default there is no limit, because a suitable limit depends on the problem."""


DEFAULTS = Experiment()
"""The default experiment: digits, MLP 64-100-10, ten clients split by two Dirichlet draws, 20 rounds."""


Named = Callable[[str, Any], str]
"""Maps a dotted key and its value to the beginning of an error message: where and how the value was set."""


def convert(kind: type[T], values: Mapping[str, Any], where: str, named: Named | None = None) -> T:
    """Build a configuration dataclass from `values`, by field name; a UsageError names a wrong key.

    where: the source of the keys, for error messages. named: makes the beginning of an error message about a
    value; by default it is `where` and the key. Numbers must be finite.
    """
    named = named or (lambda key, value: f"{where}: {key.removeprefix('hyperparameters.')} = {value!r}")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            if gone := removed("option", f"--{key.replace('_', '-')}"):
                raise UsageError(f"{where}: {key}: {gone}")
            raise unknown(f"key in {where}:", key, known)
    values = _plain(values)
    for key, value in dotted(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{named(key, value)}: must be a finite number")
        if isinstance(value, str) and not is_utf8(value):
            raise UsageError(f"{named(key, value)!a}: must be UTF-8; rename the file or folder")
    try:
        return msgspec.convert(values, type=kind)
    except msgspec.ValidationError as e:
        key, value, reason = _what_is_wrong(kind, values, str(e))
        if gone := removed("option", f"--{key} {value}"):
            raise UsageError(f"{where}: {gone}") from None
        raise UsageError(f"{named(key, value) if key else where}: {reason}") from None


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, the encoding of a run's files. A path may have bytes in
    another encoding, which Python represents as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_number(value: Any) -> Any:
    """Convert a NumPy or torch number to a Python number; leave other values, such as masked ones, as is."""
    scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not hasattr(value, "mask")
    return value.item() if scalar else value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) if isinstance(v, Mapping) else plain_number(v) for k, v in values.items()}


def _what_is_wrong(kind: type, values: Mapping[str, Any], output: str) -> tuple[str, Any, str]:
    """Parse msgspec's "Reason - at `$.a.b`" to a key, its value and a reason in plain words."""
    reason, _, path = output.partition(" - at ")
    key = path.rpartition("$")[2].strip("`.").removesuffix("[...]")
    own = not reason.startswith(("Expected ", "Invalid enum value"))
    shown: Any = values
    hint: Any = kind
    for part in key.split("."):
        shown = shown.get(part) if isinstance(shown, Mapping) else None
        hint = get_type_hints(hint, include_extras=True).get(part) if is_dataclass(hint) else None
    reason = reason[:1].lower() + reason[1:]
    return key, shown, reason if own or not key else f"must be {_expected(hint)}"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "absent"}


def _expected(hint: Any) -> str:
    """Describe the values of a type in words: "a number above 0 and at most 1"."""
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        if titled := [m.title for m in metas if isinstance(m, Meta) and m.title]:
            return titled[0]
        limits = [
            f"{word} {limit:g}"
            for meta in metas
            if isinstance(meta, Meta)
            for word, limit in (
                ("above", meta.gt),
                ("of at least", meta.ge if meta.ge != UNSET else 0),
                ("below", meta.lt),
                ("at most", meta.le),
            )
            if limit is not None
        ]
        return " ".join([_expected(base), " and ".join(limits)]).strip()
    if get_origin(hint) is Literal:
        return f"one of {', '.join(str(value) for value in get_args(hint) if value)}"
    if get_origin(hint) is Mapping:
        return "a table of {}".format(
            "any values" if get_args(hint)[1] is Any else _expected(get_args(hint)[1])
        )
    if get_origin(hint) in (UnionType, Union):
        return " or ".join(_expected(part) for part in get_args(hint))
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse key=value of --set; a value that is no TOML scalar is a string, such as 1/K."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {text!r}: give key=value, such as --set delta=0.1")
    try:
        parsed = tomllib.loads(f"v = {value}")
    except (ValueError, RecursionError):
        return key, value.strip()
    return key, parsed["v"] if isinstance(parsed["v"], bool | int | float | str) else value.strip()


def read_toml(path: Path, owner: str = "--config") -> dict[str, Any]:
    """Read a configuration file."""
    try:
        return user_files.read_toml(path)
    except OSError as e:
        raise UsageError(f"{owner} {path}: {e.strerror}") from None
    except DataError as e:
        raise UsageError(f"{owner} {e}") from None


def hyperparameter_names(algorithm: type) -> dict[str, str]:
    """Map the dotted names of all hyperparameters, and unambiguous short names (lr), to dotted names."""
    result: list[str] = []

    def walk(kind: Any, prefix: str) -> None:
        for f in fields(kind):
            value = getattr(kind, f.name, None)
            if is_dataclass(value) and not isinstance(value, type):
                walk(value, f"{prefix}{f.name}.")
            else:
                result.append(prefix + f.name)

    walk(algorithm, "")
    names = {name: name for name in result}
    for name in result:
        short = name.rpartition(".")[2]
        if sum(other.rpartition(".")[2] == short for other in result) == 1:
            names.setdefault(short, name)
    return names


def build_algorithm(algorithm: type[T], hyperparameters: Mapping[str, Any]) -> T:
    """Build the algorithm with these hyperparameters, by short or dotted name, and defaults for the others.

    In TOML a dotted name is a table, so nested tables count as dotted names.
    """
    where = f"hyperparameters of {getattr(algorithm, 'name', algorithm.__name__)}"
    names = hyperparameter_names(algorithm)
    nested: dict[str, Any] = {}
    into: dict[str, Any]
    default: Any
    spelled = {names.get(key, key): key for key, _ in dotted(hyperparameters)}
    for key, value in dotted(hyperparameters):
        if key not in names:
            gone = removed("hyperparameter", key)
            raise UsageError(f"{where}: {gone}") if gone else unknown(f"key in {where}:", key, names)
        *path, last = names[key].split(".")
        into, default = nested, algorithm
        for part in path:  # a group keeps the algorithm's own defaults where they are not overridden
            default = getattr(default, part)
            into = into.setdefault(part, asdict(default))
        into[last] = value
    named = lambda key, value: f"{where}: {spelled.get(key, key)} = {value!r}"  # noqa: E731
    return convert(algorithm, nested, where, named)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tables to dotted keys: {'local': {'lr': 1}} gives ('local.lr', 1)."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise UsageError(f"{{{prefix}{key!r}: ...}}: a name is text, such as {{'local.lr': 0.01}}")
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class LeftToAlgorithm(Protocol):
    """The defaults that an experiment takes from its algorithm (fedsim.algorithm.Algorithm)."""

    @property
    def default_model(self) -> str: ...

    @property
    def default_rounds(self) -> int: ...

    @property
    def eval_samples(self) -> int: ...

    @property
    def centralised(self) -> bool: ...


def resolved(experiment: Experiment, algorithm: LeftToAlgorithm) -> Experiment:
    """Fill in the values that the experiment leaves to its algorithm and data set."""
    from fedsim.data.catalogue import DATASETS  # imported here, because fedsim.data imports numpy

    info = DATASETS.get(experiment.dataset)
    return replace(
        experiment,
        model=experiment.model or algorithm.default_model,
        inputs=experiment.inputs or (info.default_inputs if info else "scaled"),
        rounds=algorithm.default_rounds if experiment.rounds < 0 else experiment.rounds,
        eval_samples=algorithm.eval_samples if experiment.eval_samples < 0 else experiment.eval_samples,
        participation="full" if algorithm.centralised else experiment.participation,
    )


def resolved_hyperparameters(algorithm: Any) -> dict[str, Any]:
    """Return the values of all hyperparameters by dotted name, for the manifest and `describe`."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(hyperparameter_names(type(algorithm)).values()):
        value = algorithm
        for part in name.split("."):
            value = getattr(value, part)
        out[name] = value
    return out
