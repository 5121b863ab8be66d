"""Text with indentation.

    w = Writer()
    with w.block("while True:"):
        w("x += 1")
    w.text
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Writer:
    def __init__(self, indent: str = "    ") -> None:
        self.lines: list[str] = []
        self._indent, self._depth = indent, 0

    def __call__(self, *texts: str) -> None:
        for line in (line for text in texts for line in text.split("\n")):
            self.lines.append(self._indent * self._depth + line if line else "")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """One deeper level after the head."""
        self(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
