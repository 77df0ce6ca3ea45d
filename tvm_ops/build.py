"""`python -m tvm_ops.build`: kernel libraries and their manifest, for this or another machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from tvm_ops.artifact import KernelSpec, source_digest
from tvm_ops.gpu.targets import GPU_TARGETS, GpuTarget
from tvm_ops.targets import TARGETS, CpuTarget, find_target

MANIFEST = "manifest.json"
_LAUNCHER = KernelSpec("launcher")


class BuildError(Exception):
    """What was asked for can't be built; says why and what to do."""


def build(
    target: CpuTarget | GpuTarget, kernels: Sequence[KernelSpec], out: Path, console: Console
) -> dict[str, Any]:
    """Compile `kernels`, and for a CPU the launcher, into `out`; return the manifest, written last.

    Progress is shown on `console`.

    Raises BuildError when a compiler is missing or fails, or `out` can't be written.
    """
    specs = [*kernels] if isinstance(target, GpuTarget) else [_LAUNCHER, *kernels]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST).unlink(missing_ok=True)  # it describes what was there before
        done = _compile(target, specs, out)
        title = f"building for {target.name}"
        entries = list(track(done, title, total=len(specs), console=console))
        manifest = {"format": 1, **_manifest(target, specs, entries, out)}
        (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise BuildError(f"{out} can't be written ({error})") from error
    return manifest


def _manifest(
    target: CpuTarget | GpuTarget,
    specs: Sequence[KernelSpec],
    entries: Sequence[dict[str, Any]],
    out: Path,
) -> dict[str, Any]:
    versions = {
        "tvm": metadata.version("apache-tvm"),
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
    }
    if isinstance(target, GpuTarget):
        versions["kernel_sources"] = source_digest("tree_attention", True).hex()
        kernels = [kernel for entry in entries for kernel in entry["kernels"]]
        return {"target": {"name": target.name}, "versions": versions, "kernels": kernels}
    versions["kernel_sources"] = source_digest("tree_attention").hex()
    versions["launcher_source"] = source_digest("launcher").hex()
    about = {
        "name": target.name,
        "machine": target.machine,
        "cpu_flags": sorted(target.flags),
        "llvm": target.llvm,
    }
    libraries = [
        {**_describe(spec, out), **entry} for spec, entry in zip(specs, entries, strict=True)
    ]
    return {"target": about, "versions": versions, "libraries": libraries}


def _compile(
    target: CpuTarget | GpuTarget, specs: Sequence[KernelSpec], out: Path
) -> Iterator[dict[str, Any]]:
    from tvm_ops.load import compiler_command

    command = [*compiler_command(), "--target", target.name, "--out", str(out)]
    child = subprocess.Popen(
        [*command, *map(str, specs)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            yield json.loads(line)
        messages = child.stderr.read().strip().removeprefix("error: ")
    if child.returncode:
        raise BuildError(messages or f"the compiler ended with status {child.returncode}")


def _describe(spec: KernelSpec, out: Path) -> dict[str, Any]:
    from tvm_ops.layouts import LAYOUTS

    file = f"{spec.stem}.so"
    about: dict[str, Any] = {
        "file": file,
        "sha256": hashlib.sha256((out / file).read_bytes()).hexdigest(),
        "op": spec.op,
    }
    if spec != _LAUNCHER:
        about["entry"] = f"__tvm_ffi_{spec.op}"
        about["layouts"] = [n for n, kind in LAYOUTS.items() if kind.memory == spec.memory]
        about["dtype"] = spec.dtype
    if spec.head_dim:
        about["head_dim"] = spec.head_dim
    return about


def kernels_for(
    layouts: Sequence[str], dtypes: Sequence[str], head_dims: Sequence[int]
) -> list[KernelSpec]:
    """Both ops for every combination; a dtype that a layout can't hold is left out.

    Raises BuildError for unknown names, and when a layout or a dtype is left without kernel.
    """
    from tvm_ops.layouts import DTYPE_NAMES, find_layout
    from tvm_ops.load import attention_spec, compact_spec

    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    if unknown := sorted(set(dtypes) - set(by_name)):
        raise BuildError(f"unknown dtype {unknown[0]!r}: expected one of {', '.join(by_name)}")
    try:
        held = {layout: find_layout(layout).dtypes for layout in layouts}
        pairs = [(la, by_name[dt]) for la in layouts for dt in dtypes if by_name[dt] in held[la]]
        for layout in layouts:
            if layout not in {pair[0] for pair in pairs}:
                names = [DTYPE_NAMES[dtype] for dtype in held[layout]]
                raise BuildError(f"layout {layout!r} holds {', '.join(names)}: add a --dtype of it")
        for dtype in dtypes:
            if by_name[dtype] not in {pair[1] for pair in pairs}:
                raise BuildError(f"none of the layouts {', '.join(layouts)} holds {dtype}")
        attention = [attention_spec(*pair, head_dim) for pair in pairs for head_dim in head_dims]
    except ValueError as error:
        raise BuildError(str(error)) from error
    return list(dict.fromkeys([*attention, *(compact_spec(*pair) for pair in pairs)]))


def _check_layouts(target: CpuTarget | GpuTarget, layouts: Sequence[str]) -> None:
    from tvm_ops.layouts import LAYOUTS

    on_gpu = isinstance(target, GpuTarget)
    fitting = [name for name, kind in LAYOUTS.items() if kind.strided == on_gpu]
    if wrong := sorted(set(layouts) & set(LAYOUTS) - set(fitting)):
        raise BuildError(
            f"layout {wrong[0]!r} is not for {target.name}, which has {', '.join(fitting)}"
        )


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command(
    epilog="Examples: python -m tvm_ops.build --out kernels\n\n"
    "python -m tvm_ops.build --target aarch64 --dtype bfloat16 --head-dim 64 --head-dim 128 "
    "--out kernels-arm"
)
def main(
    out: Annotated[Path, typer.Option(help="Directory for the libraries and manifest.json.")],
    target: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join([*TARGETS, *GPU_TARGETS])}; without it, this machine's best."
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="KV-cache layout, repeatable. [default: vec, on GPUs strided]"),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Element type, repeatable. [default: float32]")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dimension, repeatable. [default: 64]")
    ] = None,
) -> None:
    """Build kernel libraries and a manifest that describes them, for this or another machine."""
    console = Console(stderr=True)
    try:
        chosen = find_target(target)
        usual = "strided" if isinstance(chosen, GpuTarget) else "vec"
        _check_layouts(chosen, layout or [usual])
        kernels = kernels_for(layout or [usual], dtype or ["float32"], head_dim or [64])
        build(chosen, kernels, out, console)
    except (BuildError, ValueError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    typer.echo(out / MANIFEST)


if __name__ == "__main__":
    app()
