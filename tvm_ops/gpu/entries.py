"""Entry points of the source text that TVM writes: their arguments, in the order TVM gave them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPENCL_ENTRY = re.compile(r"__kernel void (\w+)\(([^)]*)\) \{")
# Of CUDA, OpenCL and Metal.
_C_KINDS = {
    "int": "int32",
    "uint": "uint32",
    "long": "int64",
    "int64_t": "int64",
    "float": "float32",
}
_METAL_ENTRY = re.compile(r"^kernel void (\w+)\((.*?)^\) \{", re.M | re.S)
_METAL_BUFFER = re.compile(r"device (\w+)\* (\w+) \[\[ buffer\((\d+)\) \]\]")
_METAL_STRUCT = re.compile(r"^struct \w+_args_t \{(.*?)^\};", re.M | re.S)
_METAL_PLACE = re.compile(r"constant \w+_args_t& \w+ \[\[ buffer\((\d+)\) \]\]")
_METAL_FIELD = re.compile(r"^  (\w+) (\w+)(?:\[2\])?;", re.M)
_METAL_FIELD_BYTES = 8  # TVM pads each scalar
_WEBGPU_ENTRY = re.compile(r"@compute @workgroup_size\(\d+, 1, 1\)\nfn (\w+)\(")
_WEBGPU_BUFFER = re.compile(
    r"@group\(0\) @binding\((\d+)\) var<storage, read(_write)?> (\w+) : array<(\w+)>;"
)
_WEBGPU_STRUCT = re.compile(r"^struct PODArgs \{(.*?)^\}", re.M | re.S)
_WEBGPU_PLACE = re.compile(r"@group\(0\) @binding\((\d+)\) var<uniform>")
_WEBGPU_FIELD = re.compile(r"^  (\w+): (\w+)", re.M)
_WEBGPU_KINDS = {"i32": "int32", "u32": "uint32", "f32": "float32"}


@dataclass(frozen=True)
class Argument:
    """One argument of an entry point.

    kind: "pointer", or the type of a scalar. elements: what a pointer points to. place: OpenCL's
    argument index, Metal's buffer index or WebGPU's binding in group 0. offset: bytes into the
    struct of scalars that is bound there; None for what is bound by itself.
    """

    name: str
    kind: str
    place: int
    elements: str | None = None
    offset: int | None = None


@dataclass(frozen=True)
class EntryPoint:
    """A kernel as its language calls it."""

    name: str
    arguments: tuple[Argument, ...]


def entry_point(text: str, language: str) -> EntryPoint:
    """The only entry point of a module in "opencl", "metal" or "webgpu" source.

    Raises ValueError if there is another number of them.
    """
    pattern = {"opencl": _OPENCL_ENTRY, "metal": _METAL_ENTRY, "webgpu": _WEBGPU_ENTRY}[language]
    found = list(pattern.finditer(text))
    if len(found) != 1:
        names = [match[1] for match in found]
        raise ValueError(f"expected one entry point in TVM's {language} source, got {names}")
    if language == "opencl":
        return EntryPoint(found[0][1], tuple(c_arguments(found[0][2])))
    arguments = _metal_arguments(text) if language == "metal" else _webgpu_arguments(text)
    return EntryPoint(found[0][1], tuple(arguments))


def c_arguments(text: str) -> list[Argument]:
    """Arguments of a function of CUDA or OpenCL, from the text between its parentheses."""
    arguments = []
    for place, part in enumerate(text.split(",")):
        words = part.replace("*", " * ").split()
        if "*" in words:
            elements = _C_KINDS[words[words.index("*") - 1]]
            name = words[-1].removesuffix("_ptr")
            arguments.append(Argument(name, "pointer", place, elements))
        else:
            arguments.append(Argument(words[-1], _C_KINDS[words[0]], place))
    return arguments


def _metal_arguments(text: str) -> list[Argument]:
    arguments = [
        Argument(name.removesuffix("_ptr"), "pointer", int(place), _C_KINDS[elements])
        for elements, name, place in _METAL_BUFFER.findall(text)
    ]
    fields, place = _METAL_STRUCT.search(text), _METAL_PLACE.search(text)
    if fields is None or place is None:
        raise ValueError("no struct of arguments in TVM's metal source")
    for i, (kind, name) in enumerate(_METAL_FIELD.findall(fields[1])):
        offset = i * _METAL_FIELD_BYTES
        arguments.append(Argument(name, _C_KINDS[kind], int(place[1]), None, offset))
    return arguments


def _webgpu_arguments(text: str) -> list[Argument]:
    arguments = [
        Argument(name.removesuffix("_ptr"), "pointer", int(place), _WEBGPU_KINDS[elements])
        for place, _, name, elements in _WEBGPU_BUFFER.findall(text)
    ]
    fields, place = _WEBGPU_STRUCT.search(text), _WEBGPU_PLACE.search(text)
    if fields is None or place is None:
        raise ValueError("no struct of arguments in TVM's webgpu source")
    for i, (name, kind) in enumerate(_WEBGPU_FIELD.findall(fields[1])):
        arguments.append(Argument(name, _WEBGPU_KINDS[kind], int(place[1]), None, 4 * i))
    return arguments
