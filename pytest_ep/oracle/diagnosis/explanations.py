"""The table of explanations of a wrong combine, the simplest first."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_ep.oracle.diagnosis import messages
from pytest_ep.oracle.diagnosis import outputs
from pytest_ep.oracle.diagnosis import parts
from pytest_ep.oracle.diagnosis import results
from pytest_ep.oracle.diagnosis.guess import Guess
from pytest_ep.oracle.diagnosis.scene import Scene


def _nothing(scene: Scene) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Explanation:
    """A row: ``guesses`` are its variants, none where it cannot be; ``notes`` what more a good fit can say.

    ``says`` is the sentence, with {which} and {declared}; ``probe`` shows such a fault by itself.
    """

    name: str
    says: str
    probe: str
    guesses: Callable[[Scene], Iterable[Guess]]
    notes: Callable[[Scene], list[str]] = _nothing


_ALL = (
    Explanation(
        "not finite",
        "combine returned {which}",
        "uniform",
        outputs.not_finite,
    ),
    Explanation(
        "unwritten", "the output was not written: it holds {which}", "repeated_calls", outputs.unwritten
    ),
    Explanation("stale", "the output is another combine's: {which}", "repeated_calls", outputs.stale),
    Explanation(
        "tokens", "combine returned {which}, not the staged messages", "uniform", outputs.tokens_returned
    ),
    Explanation("factor", "results are off by one common factor: {which}", "uniform", outputs.factors),
    Explanation("reduction", "the kernel follows {which}, not {declared}", "accumulator", outputs.reductions),
    Explanation("missing", "the message of {which} is missing", "rank_powers", messages.missing),
    Explanation("doubled", "the message of {which} was added twice", "rank_powers", messages.doubled),
    Explanation("alone", "the message of {which} stands for the sum", "rank_powers", messages.alone),
    Explanation(
        "per choice",
        "a rank's message was added once for each of the token's choices there",
        "several_experts",
        messages.per_choice,
    ),
    Explanation("gates", "the gate weights were applied to the messages", "uniform", messages.gates),
    Explanation(
        "gates twice", "the gate weights were applied to the messages twice", "uniform", messages.gates_twice
    ),
    Explanation(
        "padding",
        "padding was added: what timing left in slots of {which}, where the token has no expert",
        "rank_powers",
        messages.extra,
    ),
    Explanation("plane", "the messages are those for {which}: another plane", "slots", messages.other_plane),
    Explanation("columns", "the columns were moved {which}", "columns", outputs.columns),
    Explanation("fp8 messages", "the messages went through FP8 {which}", "uniform", messages.fp8),
    Explanation("result step", "results are one BF16 step away", "accumulator", outputs.result_step),
    Explanation("one bit", "one bit of each wrong result is flipped", "repeated_calls", outputs.one_bit),
    Explanation(
        "message step", "the message of {which} is one BF16 step away", "accumulator", messages.message_step
    ),
    Explanation(
        "other token", "rows are the results of other tokens", "slots", results.other_token, results.notes
    ),
    Explanation(
        "other messages",
        "sums hold messages that were not sent for their token",
        "slots",
        parts.other_messages,
        parts.notes,
    ),
)

EXPLANATIONS = {explanation.name: explanation for explanation in _ALL}
