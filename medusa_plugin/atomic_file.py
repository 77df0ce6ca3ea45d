"""Small files that others read while they are written: whole, or not there at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Put `text` into `file`, readable by all; makes its directory.

    Raises:
        OSError: it cannot be written; nothing is left behind, and an older `file` stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).chmod(0o644)  # made for us alone
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
