"""Look a name up as people type it: case and punctuation do not matter, near misses are suggested."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def find(kind: str, name: str, table: Mapping[str, T], aliases: Mapping[str, str] = _NO_ALIASES) -> T:
    """The entry of `table` called `name`, or by one of `aliases` (other name -> key of `table`).

    kind: what the table holds, for the ValueError that an unknown name raises.
    """
    keys = {_plain(key): key for key in table} | {_plain(alias): key for alias, key in aliases.items()}
    wanted = _plain(name)
    if wanted in keys:
        return table[keys[wanted]]
    close = dict.fromkeys(keys[match] for match in get_close_matches(wanted, keys, n=5, cutoff=0.5))
    known = f"did you mean {', '.join(close)}?" if close else "`kvcupy info` lists all"
    raise ValueError(f"unknown {kind} {name!r}; {known}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
