"""Finds the line of every key in a TOML text.

`tomllib` gives values without places, and only its syntax errors know their line. This scanner
walks a text that `tomllib` has accepted, so it may skip over values without judging them.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""A key with the tables that it is in; an int counts the entries of an array."""

_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # up to two quotes may stand before the closing three
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_KEY = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^"'=\]#\n])+""")
_SCALAR = re.compile(r"[^,\]}#\n]+")


@dataclass(slots=True)
class _Scanner:
    text: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    at: int = 0
    line: int = 1

    def move_to(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Moves behind what `pattern` matches here and gives it; an empty text if nothing does."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.move_to(match.end())
        return match[0]

    def next_is(self, mark: str) -> bool:
        return self.text.startswith(mark, self.at)

    def note(self, path: KeyPath) -> None:
        """Records the current line for `path` and for the tables that it opens."""
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self.line)

    def document(self) -> None:
        table: KeyPath = ()
        entries: dict[KeyPath, int] = {}
        while self.skip(_BLANK) or self.at < len(self.text):
            if self.at == len(self.text):
                return
            if self.next_is("["):
                table = self.header(entries)
            else:
                self.pair(table)

    def header(self, entries: dict[KeyPath, int]) -> KeyPath:
        """`[a.b]` or `[[a.b]]`; a table below an array of tables belongs to the array's last
        entry."""
        is_array = self.next_is("[[")
        self.move_to(self.at + (2 if is_array else 1))
        path: KeyPath = ()
        names = _names(self.skip(_KEY))
        for position, name in enumerate(names):
            path += (name,)
            if is_array and position == len(names) - 1:
                entries[path] = entries.get(path, -1) + 1
            if path in entries:
                self.note(path)
                path += (entries[path],)
        self.note(path)
        self.move_to(self.at + (2 if is_array else 1))
        return path

    def pair(self, table: KeyPath) -> None:
        path = table + _names(self.skip(_KEY))
        self.note(path)
        self.move_to(self.at + 1)  # the equals sign
        self.value(path)

    def value(self, path: KeyPath) -> None:
        self.skip(_BLANK)
        if self.next_is("["):
            self.items("]", path)
        elif self.next_is("{"):
            self.items("}", path)
        elif not self.skip(_STRING):
            self.skip(_SCALAR)

    def items(self, end: str, path: KeyPath) -> None:
        """The entries of an array or of an inline table."""
        self.move_to(self.at + 1)
        self.skip(_BLANK)
        position = 0
        while not self.next_is(end):
            if end == "}":
                self.pair(path)
            else:
                self.note((*path, position))
                self.value((*path, position))
            position += 1
            self.skip(_BLANK)
            if self.next_is(","):
                self.move_to(self.at + 1)
                self.skip(_BLANK)
        self.move_to(self.at + 1)


def _names(key: str) -> KeyPath:
    """`a."b.c"` -> ("a", "b.c"); tomllib itself undoes quotes and escapes."""
    names: list[str] = []
    table = tomllib.loads(f"{key.strip()} = {{}}")
    while table:
        ((name, table),) = table.items()
        names.append(name)
    return tuple(names)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, where each key, table and array entry of a TOML text first appears.

    `text` has to be legal TOML: parse it with `tomllib` first.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines
