"""Where numbers come from: machine, versions, commit, and digests of what was asked."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from outpace import __version__
from outpace.bench.records import Case
from outpace.models.base import Target
from outpace.models.measured import dtype_name

_PACKAGES = ("torch", "transformers", "numpy", "tokenizers")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def provenance(
    *, command: str, target: Target, config: Mapping[str, Any], cases: Iterable[Case]
) -> dict[str, Any]:
    """Everything needed to know what a report measured, and to measure it again.

    Args:
        config: settings of the benchmark, as plain values.
        cases: in the order in which they ran.
    """
    cases = list(cases)
    gpu = target.device.type == "cuda"
    return {
        **here(command),
        "gpu": torch.cuda.get_device_name(target.device) if gpu else None,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(target.dtype),
        "model": target.name,
        "note": target.note,
        "model_digest": target.digest,
        "config": dict(config),
        "config_digest": digest(config),
        "prompts": len({case.id for case in cases}),
        "prompts_digest": digest([[case.id, case.group, case.ids] for case in cases]),
        "seeds": sorted({case.seed for case in cases}),
    }


def here(command: str) -> dict[str, Any]:
    """What is known without a model: the command as it was typed, and what it ran on."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu_name(),
    }


def digest(value: Any) -> str:
    """SHA-256 of a plain value, hex; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """This package, Python, and what the numbers depend on."""
    found = {"outpace": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """Model name of the processor, as the system calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit(folder: Path | None = None) -> str | None:
    """The commit of the source tree; None if it is no git checkout.

    Args:
        folder: that holds ``.git``; by default the one in which the package lies.

    Changes that are not committed do not show.
    """
    root = folder or Path(__file__).parents[2]
    git = root / ".git"
    with contextlib.suppress(OSError):
        if git.is_file():  # a second work tree, or a submodule
            git = (root / git.read_text().removeprefix("gitdir:").strip()).resolve()
        common = git
        if (git / "commondir").is_file():
            common = (git / (git / "commondir").read_text().strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref:").strip()
        if (common / name).is_file():
            return (common / name).read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            value, _, ref = line.partition(" ")
            if ref == name:
                return value
    return None
