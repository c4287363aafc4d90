"""Where the names of other projects are documented, from short lists, so that a build needs no network.

A list in ``_inventories`` is named after its project. Its first line is the address of the project's documentation,
each other line a name, what it is in Sphinx's words (``py:class``), and its page, where ``$`` stands for the name.
"""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["inventories"]

#: Its documentation is not Sphinx's, and has no inventory to be read.
_WITHOUT_INVENTORY = {"transformers"}


def inventories(folder: Path, out: Path, *, online: bool) -> dict[str, tuple[str, str | None]]:
    """Return the setting `intersphinx_mapping`; the lists become inventories in the folder `out`."""
    mapping: dict[str, tuple[str, str | None]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for source in sorted(folder.glob("*.txt")):
        address, *entries = source.read_text(encoding="utf-8").split("\n")
        made = out / f"{source.stem}.inv"
        made.write_bytes(_inventory(source.stem, [entry for entry in entries if entry.strip()]))
        is_read = online and source.stem not in _WITHOUT_INVENTORY
        mapping[source.stem] = (address.strip(), None if is_read else str(made))
    return mapping


def _inventory(project: str, entries: list[str]) -> bytes:
    """Return the entries as an inventory of version 2."""
    head = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = []
    for entry in entries:
        name, kind, page = entry.split()
        # Only a `$` at the end is Sphinx's own.
        lines.append(f"{name} {kind} 1 {page.replace('$', name)} -\n")
    return head.encode() + zlib.compress("".join(lines).encode())
