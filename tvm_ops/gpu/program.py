"""A compiled program for a graphics processor, as it is kept in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Kernel:
    """One entry point.

    arguments: (name, kind) in the order of the call; kind is "pointer" or a scalar's type.
    threads: of a block, in one dimension.
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    threads: int


@dataclass(frozen=True)
class Program:
    """Kernels and their code: source text, or for CUDA a fat binary.

    rows, keys: of a block of tree_attention, which handles `rows` rows and visits keys in tiles of
    `keys`. combine_rows: of a block of combine. 0 for other ops.
    """

    code: bytes
    kernels: tuple[Kernel, ...]
    rows: int = 0
    keys: int = 0
    combine_rows: int = 0

    def packed(self) -> bytes:
        """One line of JSON, then the code."""
        header = asdict(self)
        del header["code"]
        return json.dumps(header).encode() + b"\n" + self.code

    @classmethod
    def unpacked(cls, content: bytes) -> Program:
        """Inverse of packed()."""
        line, _, code = content.partition(b"\n")
        header = json.loads(line)
        header["kernels"] = tuple(
            Kernel(entry["name"], tuple((n, k) for n, k in entry["arguments"]), entry["threads"])
            for entry in header["kernels"]
        )
        return cls(code, **header)
