"""The text that the demo shares between its questions, and questions that the default model answers from it."""

from __future__ import annotations

from importlib import resources

__all__ = ["QUESTIONS", "handbook"]

#: ``(question, what the answer contains)``. SmolLM2-135M-Instruct in float32 answers these, and stops, when it is
#: asked greedily in one user message: the handbook, an empty line, "Answer in one short sentence." and the question.
QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What is the name of the cat?", "Copernicus"),
    ("What is the lake called?", "Spoon Lake"),
    ("What is the name of the stove?", "Empress"),
    ("What is the weather station called?", "Grumble"),
    ("Who is the mule driver?", "Karl Weiss"),
    ("What is the bear called?", "Gustav"),
)


def handbook() -> str:
    """Return the field handbook of an invented observatory: 1 916 of SmolLM2's tokens, written for this demo."""
    return resources.files("gpuarena.demo").joinpath("handbook.md").read_text(encoding="utf-8")
