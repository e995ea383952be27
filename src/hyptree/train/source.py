"""A model as people name it, read the same way by every verb. Imports no torch: verbs ask here first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyptree.errors import UserError
from hyptree.files import require_path
from hyptree.vlm.encoders.spec import hf_source

KINDS = {
    "run": "a run of hyptree train",
    "timm": "a name of timm (hcformer_nano, timm:NAME)",
    "hf": "hf:FOLDER_OR_ID or a folder of save_pretrained",
    "open_clip": "open_clip:NAME:PRETRAINED",
    "adapter": "the folder of an adapter",
    "file": "a file of weights (.safetensors, .gguf)",
}
"""What a name can stand for."""

_MARKS = {"recipe.yaml": "run", "adapter.json": "adapter", "config.json": "hf"}
"""The file by which a folder is known."""


@dataclass(frozen=True)
class Source:
    """Where a model is."""

    kind: str
    """One of ``KINDS``."""
    name: str
    """Path or name, without the word for the kind."""

    def folder(self) -> Path:
        """The folder with its files; of a model on the Hub what was fetched, now or before."""
        if Path(self.name).is_dir():
            return Path(self.name)
        from huggingface_hub import snapshot_download

        pickles = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx"]
        try:
            return Path(snapshot_download(self.name, ignore_patterns=pickles))
        except Exception as error:  # its own errors, those of its HTTP library, of the disk
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"hf:{self.name} is no folder here, and the Hub did not give it: {why}") from error


def find_model(text: str | Path, *takes: str) -> Source:
    """What a name stands for: a run, a folder, a file, or a name with its kind before a colon; of timm also without.

    Args:
        takes: the kinds that the verb can use.

    Raises:
        UserError: nothing is there, or a model of another kind; with what would do.
    """
    text = str(text)
    word, colon, rest = text.partition(":")
    path, give = Path(text).expanduser(), "give " + ", or ".join(KINDS[kind] for kind in takes)
    kind, name = "timm", text
    if colon and word in ("hf", "timm", "open_clip"):
        kind, name = word, hf_source(rest) if word == "hf" else rest
    elif path.is_dir():
        kind = next((kind for file, kind in _MARKS.items() if (path / file).is_file()), "")
        if not kind:
            raise UserError(f"{text} holds no model, it has none of {', '.join(_MARKS)}; {give}")
    elif path.is_file():
        kind = "file"
    elif "timm" not in takes or "/" in text or "\\" in text:
        require_path(path, "file or folder" if "file" in takes else "folder", give)
    if kind not in takes:
        raise UserError(f"{text} is {KINDS[kind]}, which is not used here; {give}")
    return Source(kind, name)
