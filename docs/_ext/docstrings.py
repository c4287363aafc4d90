"""How docstrings become pages: names without a module, descriptions of fields, constructors that nobody calls."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import resolve_reference_any_inventory
from sphinx.util.nodes import make_refnode

from gpuarena._stack import Hook, Watcher

__all__ = ["setup"]

#: What annotations say, and what other projects document it as.
_ALIASES = {
    "Any": "typing.Any",
    "torch.LongTensor": "torch.Tensor",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "transformers.configuration_utils.PreTrainedConfig": "transformers.PreTrainedConfig",
    "hypothesis._settings.settings": "hypothesis.settings",
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all of it to a build."""
    app.connect("missing-reference", _find)
    app.connect("autodoc-skip-member", _skip_hooks)
    app.connect("autodoc-process-signature", _hide_private_constructors)
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)  # before napoleon, which has 500
    app.connect("doctree-read", _set_dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _find(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> Any:
    """Look a name up in all of the reference, then in the other projects, whatever kind of object it is there.

    A docstring says `KVCache` or `Stats.n_failed` wherever it stands, and annotations of names that are imported for
    type checkers only come without their module.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    objects = env.domains.python_domain.objects
    names = _names_by_last_part(env).get(target.rpartition(".")[2], ())
    found = [objects[name] for name in names if name == target or name.endswith(f".{target}")]
    places = {(entry.docname, entry.node_id) for entry in found}
    if len(places) == 1:
        docname, node_id = next(iter(places))
        return make_refnode(app.builder, node["refdoc"], docname, node_id, content, target)
    known = node.deepcopy()
    target = _ALIASES.get(target, target)
    target = re.sub(r"^np\.", "numpy.", target)
    known["reftarget"] = re.sub(r"^transformers\.cache_utils\.", "transformers.", target)
    known["reftype"] = "obj"
    return resolve_reference_any_inventory(env, True, known, content)


def _names_by_last_part(env: BuildEnvironment) -> dict[str, list[str]]:
    """Return all documented names, by what stands behind their last point."""
    if env.temp_data.get("n_names") != len(env.domains.python_domain.objects):
        by_last: dict[str, list[str]] = {}
        for name in env.domains.python_domain.objects:
            by_last.setdefault(name.rpartition(".")[2], []).append(name)
        env.temp_data["names_by_last_part"] = by_last
        env.temp_data["n_names"] = len(env.domains.python_domain.objects)
    found: dict[str, list[str]] = env.temp_data["names_by_last_part"]
    return found


def _keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading "Bytes: all that is taken", below a field, as a type and its description."""
    if what in ("attribute", "property", "data") and lines and ":" in lines[0]:
        lines[:0] = ["..", ""]  # an empty comment, for it looks at the first line


def _set_dashes(app: Sphinx, doctree: nodes.document) -> None:
    """Set a dash between a name and its description, where Sphinx and napoleon write two hyphens."""
    for field in doctree.findall(nodes.field):
        for text in list(field.findall(nodes.Text)):
            dashed = re.sub(r"^(\)?) -- ", "\\1 \N{EN DASH} ", text)
            if dashed != text:
                text.parent.replace(text, nodes.Text(dashed))


def _skip_hooks(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what an arena calls while it allocates and rolls back: nobody else does."""
    if not inspect.isfunction(obj) or name not in {*vars(Hook), *vars(Watcher)}:
        return None
    owner = getattr(sys.modules[obj.__module__], obj.__qualname__.partition(".")[0], None)
    return True if inspect.isclass(owner) and issubclass(owner, Hook) else None


def _hide_private_constructors(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Show no constructor that takes a private part: its objects come from calls of others."""
    if what != "class" or not inspect.isclass(obj):
        return None
    annotations = inspect.get_annotations(obj.__init__) if inspect.isfunction(obj.__init__) else {}
    words = {word for one in annotations.values() for word in re.findall(r"\w+", str(one))}
    return ("", returned) if words & _private_names(obj.__module__) else None


def _private_names(module: str) -> set[str]:
    """Return the names that a module imports from private ones, or defines, and that nothing exports."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)_", node.module or ""):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    exported = {
        name
        for package in (module, module.rpartition(".")[0], module.split(".")[0])
        for name in getattr(sys.modules.get(package), "__all__", ())
    }
    return found - exported
