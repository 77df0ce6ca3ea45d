"""Heads on the Hugging Face Hub: only the files that are needed, from its cache when offline."""

from __future__ import annotations

import re
from pathlib import Path

from medusa_plugin.heads.base import HeadsError
from medusa_plugin.heads.files import CONFIG_FILE, DRAFT_VOCAB_FILE
from medusa_plugin.heads.source import HEADS_FILES, MODEL_FILES, shard_names
from medusa_plugin.heads.tuning import TUNING_FILE

CALIBRATION_FILE = "calibration.json"

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_SIDE_FILES = (CONFIG_FILE, DRAFT_VOCAB_FILE, CALIBRATION_FILE, TUNING_FILE)


def locate_heads(path: str | Path) -> Path:
    """The local directory of heads that are named by a path or a hub id.

    Args:
        path: a directory, or "owner/name" or "owner/name@revision" where there is no such path.

    Raises:
        HeadsError: the repository holds no heads, or is neither reachable nor in the cache.
    """
    match = _ID.fullmatch(str(path))
    if match is None or Path(path).exists():
        return Path(path)
    return _Repository(match["repo"], match["revision"]).download()


class _Repository:
    def __init__(self, repo: str, revision: str | None) -> None:
        self._repo, self._revision = repo, revision
        self._offline = False

    def download(self) -> Path:
        """Fetch what the heads consist of; returns their directory in the cache."""
        for name in (*HEADS_FILES, *MODEL_FILES):
            weights = self._fetch(name)
            if weights is None:
                continue
            if weights.suffix == ".json":
                for shard in shard_names(weights):
                    if self._fetch(shard) is None:
                        raise HeadsError(f"{self._repo} has no file {shard}, which {name} names")
            for side_file in _SIDE_FILES:
                self._fetch(side_file)
            return weights.parent
        place = "in the cache, and the hub cannot be reached" if self._offline else "on the hub"
        raise HeadsError(
            f"there is no directory of Medusa heads at {self._repo}, and no files of heads under "
            f"this name {place} (looked for {', '.join(HEADS_FILES)} and files of models)"
        )

    def _fetch(self, name: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            file = hf_hub_download(
                self._repo, name, revision=self._revision, local_files_only=self._offline
            )
        except LocalEntryNotFoundError:
            # Else each of the files would wait for the network in vain.
            self._offline = True
            return None
        except EntryNotFoundError:
            return None
        except Exception as error:  # of the network, of permissions, of the cache's disk
            raise HeadsError(
                f"there is no directory of Medusa heads at {self._repo}, and the hub does not "
                f"give it: {type(error).__name__}: {error}"
            ) from error
        return Path(file)
