"""Results as Markdown. Plain Python only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def markers(name: str) -> tuple[str, str]:
    """The two comments between which the section `name` of a document lies."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def replace_section(document: str, name: str, text: str) -> str:
    """`document` with what is between its two markers replaced. Raises ValueError without them."""
    begin, end = markers(name)
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"expected {begin} and {end} once each")
    before, rest = document.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def circumstances_text(results: Mapping[str, Any], about: str = "", machine: str = "") -> str:
    """Command, source, versions and processor of `results`.

    Args:
        results: with the fields of `record.circumstances.circumstances`.
        about: ends the line on the run.
        machine: ends the line on the processor.
    """
    cpu = results["cpu"]
    flags = " ".join(flag for flag, has in cpu["flags"].items() if has)
    missing = " ".join(flag for flag, has in cpu["flags"].items() if not has)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    state = " with uncommitted changes" if results["git_dirty"] else ""
    lines = [
        f"`{results['command']}` at {results['git_sha'][:12]}{state}, {results['time']}. {about}",
        f"{cpu['model']}: {flags}; without {missing or 'nothing'}. {machine}",
        f"Versions: {versions}.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def summary_table(summary: Mapping[str, Any]) -> str:
    """Figures of record; what could not be measured with its reason, under NAME_reason."""
    rows = []
    for name, value in summary.items():
        if not name.endswith("_reason"):
            reason = summary.get(f"{name}_reason")
            rows.append([f"`{name}`", value if value is not None else f"none: {reason or 'n/a'}"])
    return table(["figure", "value"], rows)
