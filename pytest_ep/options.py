"""The ``--ep-*`` options and their errors: one line each, on exit code 4."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias
from typing import TypeVar

import pytest

from pytest_ep.matrix.cells import MODES
from pytest_ep.matrix.cells import PRECISIONS
from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.routing import parse_routing
from pytest_ep.matrix.shapes import DEFAULT_MODEL
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.shapes import parse_shape
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.matrix.skew import TokenSkew
from pytest_ep.matrix.skew import parse_skew
from pytest_ep.results import record

if TYPE_CHECKING:
    from pytest_ep.matrix.machine import Machine
    from pytest_ep.matrix.plan import Selection
    from pytest_ep.matrix.platforms import Platforms

MAX_TOKENS = 65536
"""Tokens per rank; ids hold five digits."""
MAX_EP_SIZE = 1024
Repeat: TypeAlias = "tuple[int, None] | tuple[None, float]"
"""Repetitions by number, or by seconds."""
Value = TypeVar("Value")
RANK_TIMEOUT = 60.0
CASE_TIMEOUT = 600.0
CLOCKS = ("auto", *record.CLOCKS)
DEVICE_CLOCKS = {"event", "graph", "kernel"}
TARGET_CI = 1.0
TIME_BUDGET = 2.0
MOST_SECONDS = 1e7
"""Of any time: what waits for it takes no longer ones."""
MOST_IDLE = 10.0
"""Seconds of a pause of --ep-idle at most: a silent rank is taken for a lost one."""


@dataclass(frozen=True)
class Options:
    """Every ``--ep-*`` value of a run. Times are in seconds."""

    selection: Selection
    exact: bool
    rank_timeout: float
    case_timeout: float
    session_budget: float | None
    resume: Path | None
    repeat: Repeat | None
    poison: bool
    allow_skips: bool
    iterations: int | None
    clocks: tuple[str, ...]
    target_ci: float
    time_budget: float
    flush_l2: bool
    idle: tuple[str, ...]
    profile: Path | None


def add_options(parser: pytest.Parser) -> None:
    """Register the options. A malformed value is a pytest.UsageError of one line as it is parsed."""
    group = parser.getgroup("ep", "expert-parallel cases")

    def add(
        name: str, parse: Callable[[str], Any], metavar: str, text: str, default: Any = None, **more: str
    ) -> None:
        parse = _refusing(name, parse)
        group.addoption(name, type=parse, metavar=metavar, help=text, default=default, **more)

    def flag(name: str, text: str) -> None:
        group.addoption(name, action="store_true", help=text)

    _add_selection(add)
    _add_run(add, flag)
    _add_timing(add, flag)


def _add_selection(add: Callable[..., None]) -> None:
    add("--ep-sku", _some, "NAME|all", "Cases of this sku instead of the machine's own")
    add("--ep-platforms", _some, "FILE", "TOML file that adds to or overrides the built-in platforms")
    add("--ep-size", _counts(MAX_EP_SIZE), "LIST", "EP sizes, as 2,8 or 1..16 for the powers of two in it")
    text = "Tokens per rank, as 1,64 or 1..512 for the powers of two"
    add("--ep-tokens", _counts(MAX_TOKENS), "LIST", text)
    add("--ep-mode", _names(MODES), "LIST", f"Modes: {', '.join(MODES)}")
    add("--ep-precision", _names(PRECISIONS), "LIST", f"Precisions: {', '.join(PRECISIONS)}")
    add("--ep-model", _models, "LIST|all", f"Model shapes by name ({DEFAULT_MODEL}): {', '.join(SHAPES)}")
    add("--ep-shape", _shape, "hidden=H,experts=E,top_k=K", "A model shape of your own")
    text = "How tokens choose experts (uniform); FILE is a .npy or .npz of recorded [tokens, top_k] ids"
    add("--ep-routing", str, "uniform|balanced|local|zipf:S|hot:N|FILE", text)
    text = "Tokens per rank, T on average (none); FILE has one whole number for each rank, as text or .npy"
    add("--ep-token-skew", str, "none|linear|FILE", text)


def _add_run(add: Callable[..., None], flag: Callable[[str, str], None]) -> None:
    add("--ep-nproc", _count(MAX_EP_SIZE), "N", "Start torchrun with N ranks on this node and run there")
    flag("--ep-exact", "Fail where combine is not bit-exact")
    text = f"Longest silence of a rank outside declared long phases ({RANK_TIMEOUT:g})"
    add("--ep-rank-timeout", _seconds, "SECONDS", text, RANK_TIMEOUT)
    text = f"Longest time of one case, kernel builds excluded ({CASE_TIMEOUT:g})"
    add("--ep-case-timeout", _seconds, "SECONDS", text, CASE_TIMEOUT)
    text = "Stop before the first case that would end later, as 90s or 20m"
    add("--ep-session-budget", duration, "TIME", text)
    add("--ep-resume", _some, "FILE", "Take over what an earlier run's result file or journal has finished")
    add("--ep-repeat", _repeat, "N|TIME", "Repeat each case's oracle N times, or for a time as 90s or 10m")
    text = "Fill receive buffers and outputs with a signalling pattern before each checked exchange"
    flag("--ep-poison", text)
    flag("--ep-allow-skips", "Exit with 0 although every case was skipped")
    text = "Fail unless a case that this matches, as -k would, was executed and passed; may be given again"
    add("--ep-require", _requirement, "EXPRESSION", text, action="append")


def _add_timing(add: Callable[..., None], flag: Callable[[str, str], None]) -> None:
    text = "Measured iterations instead of a number chosen by warm-up"
    add("--ep-iterations", _count(1_000_000), "N", text)
    text = f"Clocks, of which the first times the rows: {', '.join(CLOCKS)}"
    add("--ep-clock", _clocks, "LIST", text, CLOCKS[:1])
    text = f"Sample until the 95 %% interval of each median is within this many percent ({TARGET_CI:g})"
    add("--ep-target-ci", _percent, "PERCENT", text, TARGET_CI)
    text = f"Sample for at most this long a case and clock ({TIME_BUDGET:g}s)"
    add("--ep-time-budget", duration, "TIME", text, TIME_BUDGET)
    flag("--ep-flush-l2", "Overwrite the device's L2 cache before each timed pair, outside its windows")
    add("--ep-idle", _pauses, "LIST", "Also time the first pair after a pause, as 1ms,100ms", ())
    text = "After timing, run one more pair of each case under torch.profiler; a trace per rank goes into DIR"
    add("--ep-profile", _some, "DIR", text)


def platforms_file(config: pytest.Config) -> Path | None:
    """The file of ``--ep-platforms``."""
    path = config.getoption("ep_platforms")
    return Path(path) if path else None


def parse_options(
    config: pytest.Config, platforms: Platforms, machine: Callable[[], Machine], ranks: int
) -> Options:
    """The values of a run, checked against the platforms and the machine.

    ``machine`` is called only where a value can be judged by nothing less. Raises pytest.UsageError with one
    line that lists what is known.
    """
    from pytest_ep.matrix.plan import Selection

    selection = Selection(
        sku=_checked_sku(config.getoption("ep_sku"), platforms, machine),
        ep_sizes=config.getoption("ep_size"),
        tokens=config.getoption("ep_tokens"),
        modes=config.getoption("ep_mode"),
        precisions=config.getoption("ep_precision"),
        shapes=(shapes := _shapes(config.getoption("ep_model"), config.getoption("ep_shape"))),
        routing=_routing(config.getoption("ep_routing"), shapes),
        skew=_skew(config.getoption("ep_token_skew"), ranks),
    )
    if selection.ep_sizes:
        _check_ep_sizes(selection, platforms, machine(), ranks)
    _check_devices(config, machine)
    return Options(
        selection=selection,
        exact=config.getoption("ep_exact"),
        rank_timeout=config.getoption("ep_rank_timeout"),
        case_timeout=config.getoption("ep_case_timeout"),
        session_budget=config.getoption("ep_session_budget"),
        repeat=config.getoption("ep_repeat"),
        poison=config.getoption("ep_poison"),
        resume=Path(resume) if (resume := config.getoption("ep_resume")) else None,
        allow_skips=config.getoption("ep_allow_skips"),
        iterations=config.getoption("ep_iterations"),
        clocks=config.getoption("ep_clock"),
        target_ci=config.getoption("ep_target_ci"),
        time_budget=config.getoption("ep_time_budget"),
        flush_l2=config.getoption("ep_flush_l2"),
        idle=config.getoption("ep_idle"),
        profile=_trace_folder(config),
    )


def _check_devices(config: pytest.Config, machine: Callable[[], Machine]) -> None:
    for clock in config.getoption("ep_clock"):
        if clock in DEVICE_CLOCKS and not machine().devices:
            raise pytest.UsageError(f"--ep-clock {clock}: this machine has no accelerator, use auto or host")
    if config.getoption("ep_flush_l2") and not machine().devices:
        raise pytest.UsageError("--ep-flush-l2: this machine has no accelerator, drop it")


def _checked_sku(sku: str | None, platforms: Platforms, machine: Callable[[], Machine]) -> str:
    if not sku or sku == "all" or sku in platforms.skus or sku == (here := machine().sku):
        return sku or ""
    known = dict.fromkeys((*platforms.skus, here, "all"))
    raise pytest.UsageError(f"--ep-sku: no {sku!r}, known: {', '.join(known)}")


def _check_ep_sizes(selection: Selection, platforms: Platforms, machine: Machine, ranks: int) -> None:
    from pytest_ep.matrix.plan import known_ep_sizes

    known = known_ep_sizes(selection, machine, platforms, ranks)
    for size in selection.ep_sizes or ():
        if known is not None and size not in known:
            where = selection.sku or machine.sku
            sizes = ", ".join(str(one) for one in sorted(known))
            raise pytest.UsageError(f"--ep-size: no {size} on {where}, known: {sizes}")


def _shapes(models: tuple[str, ...] | None, own: str | None) -> tuple[Shape, ...]:
    named = models if models or own else (DEFAULT_MODEL,)
    shapes = [SHAPES[name] for name in named or ()]
    if own:
        shapes.append(parse_shape(own))
    return tuple(shapes)


def _routing(text: str | None, shapes: Sequence[Shape]) -> Routing:
    """The routing asked for, which all models take; a file is read, as numpy is imported, only here."""

    def checked(text: str) -> Routing:
        routing = parse_routing(text)
        routing.check(shapes)
        if routing.kind != "file":
            return routing
        from pytest_ep.workload import recorded

        return replace(routing, recording=recorded.describe(text, shapes))

    return UNIFORM if text is None else _refusing("--ep-routing", checked)(text)


def _skew(text: str | None, ranks: int) -> TokenSkew:
    def checked(text: str) -> TokenSkew:
        skew = parse_skew(text)
        skew.split(1, ranks)
        return skew

    return NO_SKEW if text is None else _refusing("--ep-token-skew", checked)(text)


def _refusing(option: str, parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser whose refusal is pytest's own error: argparse would print the whole usage with it."""

    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise pytest.UsageError(f"{option} {text}: {error}") from None

    return parsed


def _some(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty, give a value or drop the option")
    return text


def _whole(text: str, limit: int) -> int:
    # Its length first: Python refuses to read thousands of digits.
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= limit):
        raise ValueError(f"{text!r} is not a whole number from 1 to {limit}")
    return int(text)


def _count(limit: int) -> Callable[[str], int]:
    return lambda text: _whole(text.strip(), limit)


def _counts(limit: int) -> Callable[[str], tuple[int, ...]]:
    """A parser of ``1,64`` and ``1..512``; a range holds the powers of two in it."""

    def parsed(text: str) -> tuple[int, ...]:
        values: list[int] = []
        for part in text.split(","):
            first, dots, last = (piece.strip() for piece in part.partition(".."))
            if not dots:
                values.append(_whole(first, limit))
                continue
            low, high = _whole(first, limit), _whole(last, limit)
            powers = [1 << bit for bit in range(high.bit_length()) if low <= 1 << bit <= high]
            if not powers:
                raise ValueError(f"no power of two in {low}..{high}")
            values += powers
        return tuple(sorted(_distinct(values)))

    return parsed


def _list(text: str) -> list[str]:
    return _distinct([part.strip() for part in text.split(",")])


def _distinct(values: list[Any]) -> list[Any]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{value} is given twice")
    return values


def _known(names: list[str], known: Iterable[str]) -> tuple[str, ...]:
    known = tuple(known)
    for name in names:
        if name not in known:
            raise ValueError(f"no {name!r}, known: {', '.join(known)}")
    return tuple(names)


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    return lambda text: _known(_list(text), known)


def _models(text: str) -> tuple[str, ...]:
    names = _known(_list(text), (*SHAPES, "all"))
    if "all" not in names:
        return names
    if len(names) > 1:
        raise ValueError("all means every model: name the models, or give all only")
    return tuple(SHAPES)


def _shape(text: str) -> str:
    parse_shape(text)
    # As text: pytest-xdist sends every option to its workers and knows plain values only.
    return text


def _requirement(text: str) -> str:
    from pytest_ep.gate import compiled

    compiled(text)
    return text


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a positive number of {what}")
    return value


def _seconds(text: str, unit: float = 1.0) -> float:
    value = _positive(text, "seconds") * unit
    if value > MOST_SECONDS:
        raise ValueError(f"is more than {MOST_SECONDS:.0f} seconds")
    return value


def _percent(text: str) -> float:
    return _positive(text, "percent")


def _repeat(text: str) -> Repeat:
    if text.strip().isdecimal():
        return _count(1_000_000)(text), None
    return None, duration(text)


def duration(text: str) -> float:
    """Seconds of a duration such as ``20m`` or ``100ms``. Raises ValueError."""
    number = text.rstrip("mush")
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    if text[len(number) :] not in units:
        raise ValueError(f"{text!r} is no duration: a number and us, ms, s, m or h, as 20m")
    return _seconds(number, units[text[len(number) :]])


def _pauses(text: str) -> tuple[str, ...]:
    """The pauses as they were written: they name what is recorded."""
    names = _list(text)
    for name in names:
        if not re.fullmatch(r"[0-9]+(us|ms|s)", name) or not duration(name) <= MOST_IDLE:
            raise ValueError(f"{name!r} is no pause up to {MOST_IDLE:g}s: a whole number and us, ms or s")
    return tuple(names)


def _trace_folder(config: pytest.Config) -> Path | None:
    """The folder of ``--ep-profile``, made now: traces are written once a case has been timed."""
    text = config.getoption("ep_profile")
    if text is None:
        return None
    folder = Path(text)
    try:
        used = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
        if not (used or config.option.collectonly):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made, {error.strerror}"
        raise pytest.UsageError(f"--ep-profile {text}: {why}: name another folder") from None
    if used:
        raise pytest.UsageError(f"--ep-profile {text}: is there already and not empty, name another folder")
    return folder


def _clocks(text: str) -> tuple[str, ...]:
    names = _known(_list(text), CLOCKS)
    if "auto" in names and len(names) > 1:
        raise ValueError("auto chooses alone: name the clocks, or give auto only")
    return names
