"""What a run found so far, as `build/soak.json` has it; a later run can go on from there."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record.circumstances import circumstances

from tests.soak.rounds import RoundResult

MOST_TIES = 0.002
"""Share of the requests compared; rounding alone makes a tenth of it."""
MOST_GROWTH_MB = 200.0


class Report:
    """Sums over the rounds of a run, kept in a file.

    Args:
        path: of the file.
        resume: go on from what it holds, if it was made from this source.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._memory: list[float] = []
        self.values: dict[str, Any] = {
            "compared": 0,
            "checked_by_rules": 0,
            "mismatches": 0,
            "ties": 0,
            "leaked_blocks": 0,
            "other_leftovers": 0,
            "memory_growth_mb": 0.0,
            "seconds": 0.0,
            "seeds": [],
            "findings": [],
            "tie_gaps": [],
            "by_configuration": {},
            "exercised": {},
        }
        here = circumstances()
        if resume and path.is_file():
            old = json.loads(path.read_text())
            if old["git_sha"] != here["git_sha"] or old["git_dirty"] or here["git_dirty"]:
                raise ValueError(
                    f"{path} was made from source {old['git_sha']}, this is {here['git_sha']}, and "
                    "both must be committed: results of two sources do not add up. Start anew"
                )
            self.values |= old
        self.values |= here

    def add(self, result: RoundResult) -> None:
        """Count a round and write the file."""
        values = self.values
        values["compared"] += result.compared
        values["checked_by_rules"] += result.checked_by_rules
        values["mismatches"] += len(result.mismatches)
        values["ties"] += len(result.findings) - len(result.mismatches)
        values["seconds"] = round(values["seconds"] + result.seconds, 1)
        values["seeds"].append(result.seed)
        for name, number in result.leftovers.items():
            kind = "leaked_blocks" if name.endswith("leaked_blocks") else "other_leftovers"
            values[kind] += number
        values["findings"] += [asdict(finding) for finding in result.mismatches]
        values["tie_gaps"] += [
            {"seed": finding.seed, "case": finding.case, "gap": finding.gap, "what": finding.what}
            for finding in result.findings
            if finding.is_tie
        ]
        per_engine = values["by_configuration"]
        per_engine[result.configuration] = per_engine.get(result.configuration, 0) + result.compared
        values["exercised"] = dict(sorted((Counter(values["exercised"]) + result.counts).items()))
        self._note_memory()
        self.write()

    @property
    def next_seed(self) -> int | None:
        """After the last one that was run."""
        seeds = self.values["seeds"]
        return max(seeds) + 1 if seeds else None

    @property
    def faults(self) -> list[str]:
        """Why the run failed; empty if it did not."""
        values = self.values
        found = [
            f"{values[name]} {name.replace('_', ' ')}"
            for name in ("mismatches", "leaked_blocks", "other_leftovers")
            if values[name]
        ]
        if values["ties"] > max(3, MOST_TIES * values["compared"]):
            found.append(f"{values['ties']} ties, more than rounding explains")
        if values["memory_growth_mb"] > MOST_GROWTH_MB:
            found.append(f"memory grew by {values['memory_growth_mb']} MB")
        return found

    def write(self) -> None:
        """Replace the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.values, indent=1, default=str) + "\n")
        new.replace(self._path)

    def forget_memory(self) -> None:
        """Count growth from here: an engine that starts takes its memory once."""
        self._memory.clear()

    def _note_memory(self) -> None:
        self._memory.append(resident_mb())
        half = len(self._memory) // 2
        if half >= 3:
            # Medians of a half each: single rounds differ by what they allocate for a time.
            first, last = sorted(self._memory[:half]), sorted(self._memory[half:])
            grown = last[len(last) // 2] - first[len(first) // 2]
            self.values["memory_growth_mb"] = round(grown, 1)


def resident_mb() -> float:
    """Memory of this process in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
