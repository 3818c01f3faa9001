"""Model shapes by name."""

from __future__ import annotations

from dataclasses import dataclass

MIN_HIDDEN = 64
MOST = 2**20
"""Of anything in a shape of one's own: far above any model, and numbers of that size still multiply."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape as expert-parallel communication sees it."""

    name: str
    hidden: int
    experts: int
    top_k: int
    source: str = ""

    def owned(self, ep_size: int) -> tuple[int, ...]:
        """First expert of each rank's contiguous block, then the number of experts: ep_size + 1 bounds.

        Where ep_size does not divide the experts, the first ranks own one more.
        """
        base, more = divmod(self.experts, ep_size)
        return tuple(rank * base + min(rank, more) for rank in range(ep_size + 1))


DEFAULT_MODEL = "deepseek_v3"

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "deepseek_v3",
            7168,
            256,
            8,
            "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json",
        ),
        Shape("deepseek_v4_pro", 7168, 384, 6, "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro"),
        Shape(
            "kimi_k2",
            7168,
            384,
            8,
            "https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json",
        ),
        Shape(
            "qwen3_235b", 4096, 128, 8, "https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json"
        ),
        Shape(
            "gpt_oss_120b", 2880, 128, 4, "https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json"
        ),
        Shape(
            "mixtral_8x7b",
            4096,
            8,
            2,
            "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json",
        ),
    )
}
"""Shapes by name; hidden, routed experts and top-k as each model's own configuration states them."""

_LETTERS = {"hidden": "h", "experts": "e", "top_k": "k"}


def parse_shape(text: str) -> Shape:
    """A shape of one's own from ``hidden=H,experts=E,top_k=K``, the fields in any order.

    It is named after its numbers: ``h4096e128k8``. Raises ValueError with one line that says what is wrong.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        field, _, value = (piece.strip() for piece in part.partition("="))
        if field not in _LETTERS:
            raise ValueError(f"no field {field!r}, write hidden=H,experts=E,top_k=K")
        if field in sizes:
            raise ValueError(f"{field} is given twice")
        if not (value.isascii() and value.isdigit() and value.strip("0")):
            raise ValueError(f"{field} must be a positive whole number, not {value!r}")
        # Its length first: Python refuses to read thousands of digits.
        if len(value) > 20 or int(value) > MOST:
            raise ValueError(f"{field} must be at most {MOST}, not {value}")
        sizes[field] = int(value)
    if missing := [field for field in _LETTERS if field not in sizes]:
        raise ValueError(f"{' and '.join(missing)} missing, write hidden=H,experts=E,top_k=K")
    if sizes["hidden"] < MIN_HIDDEN:
        raise ValueError(f"hidden must be at least {MIN_HIDDEN}, not {sizes['hidden']}")
    if sizes["top_k"] > sizes["experts"]:
        raise ValueError(f"top_k {sizes['top_k']} is more than {sizes['experts']} experts")
    name = "".join(f"{letter}{sizes[field]}" for field, letter in _LETTERS.items())
    return Shape(name, source="--ep-shape", **sizes)
